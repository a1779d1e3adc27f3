"""A run and its plan: kept at the start, compared in the report, learned from at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.errors import GH200Error, RunFailed
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.operate import launching, planned, run_lock
from simpletuner_gh200.operate.report.page import build
from simpletuner_gh200.plan import calibration, planning
from simpletuner_gh200.plan.machines import MACHINES, RATES, this_machine
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.units import GIB
from tests.unit.machine_driver import MachineDriver

CONFIG = {
    "model_family": "flux",
    "model_type": "full",
    "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "optimizer": "adamw_bf16",
    "train_batch_size": 1,
}


@pytest.fixture
def located(tmp_path: Path) -> Located:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "output_dir": str(tmp_path / "output")}))
    return Located.at(file)


def recorded(output: Path, used: int, *, count: int = 3, step: dict[str, float] | None = None, **more: int) -> None:
    """Telemetry of some steps with so much in use on the device."""
    (output / "gh200").mkdir(parents=True, exist_ok=True)
    steps = [
        {
            "kind": "step",
            "step": n,
            "step_seconds": 1.0 + n,
            "device": {"used": used, **more},
            "host": {"resident": GIB},
            **(step or {}),
        }
        for n in range(count)
    ]
    lines = [{"kind": "start", "step": 0}, *steps]
    (output / "gh200" / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_cannot_fit_is_refused_before_it_starts(located):
    with detect.using(MachineDriver(MACHINES["gh200-96"])), pytest.raises(RunFailed, match="does not fit"):
        planned.check(read_training(located, {}))
    with detect.using(NullDriver("no GPU here")):
        assert planned.check(read_training(located, {})).notes == (), "somebody tries it out"


def test_a_mistake_of_the_plan_stops_no_run(located, monkeypatch):
    def mistaken(*_arguments: object) -> None:
        raise ZeroDivisionError("of the plan")

    monkeypatch.setattr(planning, "quick_plan", mistaken)
    with detect.using(MachineDriver(MACHINES["gh200-96"])):
        (notice,) = planned.check(read_training(located, {})).notes
    assert "ZeroDivisionError: of the plan" in notice


def test_a_plan_is_left_only_beside_a_run_that_has_a_feature_of_ours(located, tmp_path):
    with detect.using(NullDriver("no GPU here")):
        planned.check(read_training(located, {})).keep()
        assert not (tmp_path / "output").exists(), "off means off"
        found = planned.check(read_training(located, {}, flags=['--cache_config={"vae_cache_type": "unified_memory"}']))
        assert not (tmp_path / "output").exists(), "nothing is written before the run has the folder to itself"
    found.keep()
    assert planning.kept(tmp_path / "output") is not None
    assert [path.name for path in (tmp_path / "output" / "gh200").iterdir()] == ["plan.json"], "and no draft"


def test_the_plan_of_a_run_in_progress_stays_when_a_second_job_is_refused(located, tmp_path):
    output = tmp_path / "output"
    command = launching.LaunchCommand((sys.executable, "-m", "simpletuner_gh200.launch"), {})
    kept = []
    with run_lock.held(output), pytest.raises(GH200Error):
        launching.run(command, output, once_ours=lambda: kept.append(True))
    assert not kept


def test_the_report_shows_planned_against_measured(located, tmp_path):
    plan = planning.quick_plan(read_training(located, {}), MACHINES["gh200-96"])
    output = tmp_path / "output"
    recorded(output, used=2 * plan.evaluated.held("train", "hbm"))
    assert planned.compared(read_run(output)) == [], "a run without a plan"
    planning.keep(plan, output)
    rows = {row[0]: row for row in planned.compared(read_run(output))}
    assert rows["HBM, most in use"][3] == "+100%"
    assert "a step, at least" in rows
    assert "Planned against measured" in build(output)


def test_a_run_on_a_device_calibrates_the_next_plan(located, tmp_path, private_cache):
    plan = planning.quick_plan(read_training(located, {}), MACHINES["gh200-96"])
    output = tmp_path / "output"
    planning.keep(plan, output)
    with detect.using(MachineDriver(MACHINES["gh200-96"])):
        here = this_machine()

    def learned() -> int:
        with detect.using(MachineDriver(MACHINES["gh200-96"])):
            planned.learn({"output_dir": str(output)})
        return calibration.calibrated(here).context

    assumed = here.context
    assert learned() == assumed, "nothing was recorded yet"
    recorded(output, used=43 * GIB)
    assert learned() == assumed, "what torch reserved is not known"
    recorded(output, used=43 * GIB, reserved=40 * GIB)
    assert learned() == 3 * GIB
    again = make_plan(read_training(located, {}), here, trace=False)
    assert {row.source for row in again.evaluated.rows if row.what == "context"} == {"assumed"}, (
        "no refusal rests on it"
    )


def test_nothing_is_learned_where_torch_reserves_memory_in_grace(located, tmp_path, private_cache):
    training = read_training(located, {}, flags=['--gh200_optimizations={"use_uvm": true}'])
    output = tmp_path / "output"
    planning.keep(planning.quick_plan(training, MACHINES["gh200-96"]), output)
    recorded(output, used=43 * GIB, reserved=40 * GIB)
    planned.learn({"output_dir": str(output)})
    here = replace(MACHINES["gh200-96"], name="this")
    assert calibration.calibrated(here) == here


# -- rates ---------------------------------------------------------------------------------------------------------

HERE = replace(MACHINES["gh200-96"], name="this", title="a GH200 in a test")


def test_a_rate_that_was_measured_here_takes_the_place_of_the_cited_one_and_says_who_measured(private_cache, located):
    calibration.remember(HERE, {"h2d": 300e9, "flops": None}, "gh200 prove")
    calibration.remember(HERE, {"flops": 250e12}, "run one")
    found = make_plan(read_training(located, {}), HERE, trace=False).to_json()
    assert (found["rate_values"]["h2d"], found["rates"]["h2d"]) == (300e9, "measured: gh200 prove")
    assert (found["rate_values"]["flops"], found["rates"]["flops"]) == (250e12, "measured: run one")
    assert found["rates"]["d2h"].startswith("cited"), "nobody measured it"
    assert found["rates"].keys() >= RATES.keys(), "no number without its source"
    other = replace(HERE, title="another kind of node with the same home")
    assert calibration.calibrated(other) == other
    published = replace(HERE, name="gh200-96")
    assert calibration.calibrated(published) == published, "published ones stay as they are, whatever their title"


@pytest.mark.parametrize("absurd", [float("inf"), float("nan"), 0.0, -1.0, 1e30])
def test_an_absurd_rate_is_not_believed(private_cache, absurd):
    calibration.remember(HERE, {"h2d": absurd}, "somebody")
    assert calibration.calibrated(HERE) == HERE


def test_a_name_that_is_no_rate_is_refused_with_those_there_are(private_cache):
    with pytest.raises(ValueError, match="no rate of a machine: hbm; there are flops, hbm_rate, h2d"):
        calibration.remember(HERE, {"hbm": 1.0}, "somebody")


def steps(**changed: float) -> list[dict[str, float]]:
    usual = {
        "step_seconds": 2.0,
        "data_wait_seconds": 0.1,
        "other_seconds": 0.5,
        "micro_batches": 3,
        "samples_per_second": 6.0,
    }
    slow = {**usual, "step_seconds": 60.0, "data_wait_seconds": 50.0}
    return [slow, slow, *[{**usual, **changed}] * calibration.FEWEST]


def test_what_the_device_reached_is_what_the_plan_counted_by_what_the_steps_took():
    assert calibration.learned_flops(5e12, steps()) == pytest.approx(5e12 * 3 / 1.5)
    assert calibration.learned_flops(5e12, steps(save_seconds=0.5)) == pytest.approx(5e12 * 3), (
        "a checkpoint is no work"
    )
    assert calibration.learned_flops(None, steps()) is None, "nothing was traced"
    assert calibration.learned_flops(5e12, steps()[:-1]) is None, "too few"
    assert calibration.learned_flops(5e12, steps(data_wait_seconds=1.0)) is None, "the data side was measured"


def test_what_the_data_side_hands_over_is_counted_of_one_rank():
    assert calibration.learned_samples(steps(), 2) == pytest.approx(6.0 * 2.0 / 2 / 0.1)
    assert calibration.learned_samples(steps(data_wait_seconds=0.0), 1) is None


def test_features_measure_the_link_and_staging_the_disk():
    large = {"bytes": GIB, "seconds": 0.5, "codecs": {"raw": 7}}
    details = {"activations": {"link": {"h2d": 3e11, "d2h": 2e11, "work": 1.0}}, "store": {"a": large}}
    assert calibration.measured_by_features(details) == {"h2d": 3e11, "d2h": 2e11, "disk_rate": 2 * GIB}
    for other in ({**large, "codecs": {"raw": 1, "lz4": 1}}, {**large, "bytes": 1000}, "damaged"):
        assert calibration.measured_by_features({"store": {"a": other}})["disk_rate"] is None
    assert calibration.measured_by_features({"activations": {"link": None}}) == dict.fromkeys(
        ("h2d", "d2h", "disk_rate")
    )


@pytest.mark.parametrize(("prefetch", "learns"), [(False, True), (True, False)])
def test_a_runs_own_rates_are_in_this_machines_next_plan(located, tmp_path, private_cache, prefetch, learns):
    output = tmp_path / "output"
    training = read_training(located, {}, flags=['--gh200_optimizations={"enable_uvm_hints": true}'])
    with detect.using(NullDriver("no GPU here")):
        plan = planning.quick_plan(training, this_machine())
        planning.keep(plan, output)
        kept = json.loads((output / planning.FILE).read_text())
        kept["step"]["flops"] = 5e10
        (output / planning.FILE).write_text(json.dumps(kept))
        recorded(output, used=0, count=9, step=steps()[-1])
        planned.learn(
            {"output_dir": str(output), "dataloader_prefetch": prefetch},
            {"details": {"store": {"a": {"bytes": GIB, "seconds": 0.5, "codecs": {"raw": 7}}}}},
        )
        found = make_plan(training, this_machine(), trace=False)
    assert found.machine.flops == pytest.approx(1e11)
    assert found.machine.disk_rate == pytest.approx(2 * GIB)
    assert found.machine.rate_sources["flops"] == "measured: run output"
    assert (found.machine.from_files == pytest.approx(120.0)) is learns
    assert found.evaluated.seconds["disk"] < plan.evaluated.seconds["disk"] * 3 * 10**9 / (1.9 * GIB)
