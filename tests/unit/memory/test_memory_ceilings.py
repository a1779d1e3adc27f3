"""The ceilings as numbers: what each may have on machines we know."""

from __future__ import annotations

from dataclasses import replace

from simpletuner_gh200.memory.ceilings import (
    activations_allowance,
    activations_reserve,
    activations_room,
    caches_allowance,
    dataset_allowance,
    divide,
    end_mark,
    low_mark,
    staging_must_stop,
    trial_room,
)
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB, MIB

NOTHING = NullDriver().capabilities(0)
HOPPER = replace(NOTHING, mode="numa", device_total=96 * GIB, absence=None)


def host(available: int, limit: str = "MemAvailable") -> HostMemory:
    return HostMemory(total=100 * GIB, free=available, available=available, limit=limit)


def test_a_dataset_gets_the_lower_of_its_limit_and_the_machines() -> None:
    assert dataset_allowance(10, host(50 * GIB)).size == 10 * GIB
    by_machine = dataset_allowance(90, host(50 * GIB, "cgroup job"))
    assert by_machine.size == 50 * GIB - 256 * MIB - 2 * GIB
    assert "cgroup job" in by_machine.why
    assert dataset_allowance(None, host(0)).size == 0


def test_staging_stops_when_half_its_working_memory_is_gone() -> None:
    assert staging_must_stop(host(127 * MIB))
    assert not staging_must_stop(host(128 * MIB))


def test_caches_get_their_limit_or_a_share_of_the_host() -> None:
    assert caches_allowance(3 * GIB, host(GIB)) == 3 * GIB, "a limit is taken at its word"
    assert caches_allowance(None, host(100 * GIB)) == 80 * GIB


def test_in_a_pool_shared_with_the_gpu_datasets_and_caches_leave_it_half_together() -> None:
    dataset = dataset_allowance(None, host(90 * GIB), single_pool=True)
    assert dataset.size == 40 * GIB and "half of all memory kept for the GPU" in dataset.why
    assert caches_allowance(None, host(90 * GIB), single_pool=True) == 40 * GIB
    assert caches_allowance(None, host(60 * GIB), single_pool=True) == 10 * GIB, "after a dataset took 30"
    assert caches_allowance(None, host(40 * GIB), single_pool=True) == 0
    assert dataset_allowance(80, host(90 * GIB), single_pool=True).size == 80 * GIB, "a limit is the user's word"


def test_a_run_ends_before_nothing_responds() -> None:
    for total in (4 * GIB, 128 * GIB, 480 * GIB):
        assert 128 * MIB <= end_mark(total) < low_mark(total)


def test_caches_of_small_entries_come_first_and_what_is_over_is_room_for_all() -> None:
    needs = {"latents": (10, 1000), "text": (100, 500)}
    assert divide(needs, 700) == {"latents": 200, "text": 500}
    assert divide(needs, 1700) == {"latents": 1100, "text": 600}
    assert divide({}, 5) == {}


def test_a_trial_leaves_a_tenth_of_all_memory() -> None:
    assert trial_room(HOPPER, 4 * GIB) == 90 * GIB
    assert trial_room(replace(HOPPER, integrated=True), 40 * GIB) == 36 * GIB


def test_the_mark_fits_small_containers_and_large_machines() -> None:
    assert low_mark(4 * GIB) == 256 * MIB
    assert low_mark(100 * GIB) == 3 * GIB
    assert low_mark(480 * GIB) == 8 * GIB


def test_activations_get_their_limit_or_their_ranks_part_of_half() -> None:
    assert activations_allowance(10, host(50 * GIB), 4).size == 10 * GIB
    assert activations_allowance(None, host(50 * GIB), 1).size == 24 * GIB
    assert activations_allowance(None, host(50 * GIB), 4).size == 6 * GIB
    too_much = activations_allowance(90, host(50 * GIB), 1)
    assert too_much.size == 48 * GIB
    assert "activation_limit_gb 90" in too_much.why


def test_activations_leave_a_reserve_of_hbm() -> None:
    assert activations_reserve(None, 96 * GIB) == int(0.05 * 96 * GIB)
    assert activations_reserve(None, 8 * GIB) == 2 * GIB
    assert activations_reserve(0, 96 * GIB) == 0
    assert activations_room(50 * GIB, 96 * GIB, 30 * GIB, 5 * GIB) == 15 * GIB
    assert activations_room(10 * GIB, 96 * GIB, 30 * GIB, 5 * GIB) == 0
