"""Where state goes and how much, as numbers; the table of optimizers; the choice of a mechanism."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from simpletuner_gh200.memory.ceilings import state_allowance
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.pool.probe import Tried, choose, impossible
from simpletuner_gh200.model.optimizer_table import optimizers, seconds_in_place, streaming_wins
from simpletuner_gh200.model.placement import Placement, automatic_budget, split
from simpletuner_gh200.model.refusals import torch_refusal
from simpletuner_gh200.units import GIB, MIB

GRACE = HostMemory(total=480 * GIB, free=470 * GIB, available=470 * GIB, limit="MemAvailable")
HBM = 96 * GIB


@given(some.lists(some.integers(1, 64 * MIB)), some.integers(0, GIB))
def test_gpu_first_never_keeps_more_than_its_budget(sizes: list[int], budget: int) -> None:
    placement = Placement("gpu_first", 0, budget)
    hbm, pool = split(sizes, placement)
    assert hbm + pool == sum(sizes)
    assert hbm <= budget
    assert split(sizes, replace(placement, pattern="cpu_first")) == (0, sum(sizes))


def test_small_tensors_and_counters_stay() -> None:
    placement = Placement("cpu_first", MIB)
    assert split([MIB - 1, MIB], placement) == (MIB - 1, MIB)
    assert not placement.takes(8, 0)


def test_the_automatic_budget_is_what_the_first_step_left() -> None:
    found = automatic_budget(total=HBM, others=2 * GIB, peak=50 * GIB, at_step=40 * GIB)
    assert found.size == HBM - 52 * GIB - int(0.05 * HBM)
    assert automatic_budget(total=HBM, others=0, peak=40 * GIB, at_step=95 * GIB).size == 0
    assert "50 GiB at the peak" in found.why


def test_gradients_that_outlive_a_step_leave_less_for_state() -> None:
    given = {"total": HBM, "others": 0, "peak": 50 * GIB}
    plain = automatic_budget(**given, at_step=0).size
    assert automatic_budget(**given, at_step=0, outliving=15 * GIB).size == plain - 15 * GIB
    within = automatic_budget(**given, at_step=70 * GIB, outliving=15 * GIB)
    assert within.size == plain - 20 * GIB, "at the step they are among what is held"


@pytest.mark.parametrize(
    ("ratio", "host", "claimed", "ranks", "size", "why"),
    [
        (1.0, GRACE, 0, 1, HBM, "1 x HBM"),
        (5.0, GRACE, 0, 1, 470 * GIB - int(0.03 * 480 * GIB), "less 14.4 GiB reserve"),
        (5.0, GRACE, 300 * GIB, 1, 170 * GIB - int(0.03 * 480 * GIB), "300 GiB promised to datasets and caches"),
        (5.0, GRACE, 0, 4, (470 * GIB - int(0.03 * 480 * GIB)) // 4, "divided among 4 ranks"),
        (5.0, replace(GRACE, available=GIB, limit="cgroup job"), 0, 1, 0, "cgroup job"),
    ],
)
def test_the_limit_is_the_least_of_all(
    ratio: float, host: HostMemory, claimed: int, ranks: int, size: int, why: str
) -> None:
    found = state_allowance(ratio=ratio, device_total=HBM, host=host, claimed=claimed, ranks=ranks)
    assert found.size == size
    assert why in found.why


def test_the_node_it_is_bound_to_limits_it_too() -> None:
    found = state_allowance(ratio=5.0, device_total=HBM, host=GRACE, claimed=0, ranks=1, on_node=100 * GIB)
    assert found.size == 100 * GIB - int(0.03 * 480 * GIB) // 4
    assert "CPU node" in found.why


def test_the_table_says_what_a_full_fine_tune_keeps() -> None:
    assert optimizers()["adamw_bf16"].bytes_per_parameter("bf16") == 6
    assert optimizers()["torch-adamw"].bytes_per_parameter("fp32") == 8
    assert optimizers()["adamw_bf16"].bytes_per_parameter("fp32") is None


def test_it_is_read_without_torch() -> None:
    code = "import sys, simpletuner_gh200.model.placement, simpletuner_gh200.model.optimizer_table as t; t.optimizers()"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_streaming_wins_where_passes_say_so() -> None:
    facts, size = optimizers()["adamw_bf16"], 66 * GIB
    assert seconds_in_place(facts, size, 330e9, 300e9) == pytest.approx(3 * size / 330e9)
    assert streaming_wins(facts, size, 330e9, 300e9)
    assert not streaming_wins(replace(facts, reads=1.0, writes=1.0), size, 330e9, 300e9)
    assert not streaming_wins(optimizers()["optimi-adamw"], size, 330e9, 300e9)
    assert not streaming_wins(facts, 0, 330e9, 300e9)


FAST, SLOW, BROKEN = Tried("host", 340e9, 300e9), Tried("vmm", 1.5e9, 1.5e9), Tried("vmm", error="refused")


@pytest.mark.parametrize(
    ("trials", "taken", "why"),
    [
        ([FAST, SLOW], "host", "less than a tenth"),
        ([FAST, BROKEN], "host", "refused"),
        ([FAST, Tried("vmm", 345e9, 310e9)], "host", "no faster"),
        ([FAST, Tried("vmm", 450e9, 400e9)], "vmm", "no faster"),
        ([Tried("host", error="no"), Tried("vmm", 9e9, 8e9)], "vmm", "not host: no"),
    ],
)
def test_numbers_choose_the_mechanism(trials: list[Tried], taken: str, why: str) -> None:
    choice = choose(trials)
    assert choice is not None
    assert choice.taken.mechanism == taken
    assert why in choice.why


def test_where_nothing_works_there_is_no_choice() -> None:
    assert choose([BROKEN, Tried("host", error="no")]) is None


def test_what_a_device_rules_out_is_not_tried() -> None:
    able = replace(NullDriver().capabilities(0), maps_host_memory=True, node_vmm=True, host_node=0)
    assert impossible("host", able) is impossible("vmm", able) is None
    assert "CPU node" in str(impossible("vmm", replace(able, host_node=None)))
    assert "virtual memory" in str(impossible("vmm", replace(able, node_vmm=False)))
    assert "map host memory" in str(impossible("host", replace(able, maps_host_memory=False)))


@pytest.mark.parametrize(
    ("version", "conf", "reason"),
    [
        ("2.7.1+cu128", "", "2.8 is the first"),
        ("2.9.1+cu128", "expandable_segments:True", "expandable_segments"),
        ("2.9.1+cu128", "expandable_segments:False", None),
        ("2.14.1+cu130", "expandable_segments:True", None),
        ("2.8.0", "", None),
        ("from git", "", "can't be read"),
    ],
)
def test_torch_that_cannot(version: str, conf: str, reason: str | None) -> None:
    found = torch_refusal(version, conf)
    assert (found is None) if reason is None else (found is not None and reason in found)
