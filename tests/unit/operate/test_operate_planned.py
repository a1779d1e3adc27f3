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
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.operate import launching, planned, run_lock
from simpletuner_gh200.operate.report.page import build
from simpletuner_gh200.plan import calibration, quick
from simpletuner_gh200.plan.machines import MACHINES
from simpletuner_gh200.plan.placing import Constants
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.plan.simulate import SimulatedDriver
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.units import GIB

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


def recorded(output: Path, used: int, **more: int) -> None:
    """Telemetry of three steps with so much in use on the device."""
    (output / "gh200").mkdir(parents=True, exist_ok=True)
    steps = [
        {
            "kind": "step",
            "step": n,
            "step_seconds": 1.0 + n,
            "device": {"used": used, **more},
            "host": {"resident": GIB},
        }
        for n in range(3)
    ]
    lines = [{"kind": "start", "step": 0}, *steps]
    (output / "gh200" / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_cannot_fit_is_refused_before_it_starts(located):
    with detect.using(SimulatedDriver(MACHINES["gh200-96"])), pytest.raises(RunFailed, match="does not fit"):
        planned.check(located, [])
    with detect.using(NullDriver("no GPU here")):
        assert planned.check(located, []).notes == (), "somebody tries it out"


def test_a_mistake_of_the_plan_stops_no_run(located, monkeypatch):
    def mistaken(*_arguments: object) -> None:
        raise ZeroDivisionError("of the plan")

    monkeypatch.setattr(quick, "quick_plan", mistaken)
    with detect.using(SimulatedDriver(MACHINES["gh200-96"])):
        (notice,) = planned.check(located, []).notes
    assert "ZeroDivisionError: of the plan" in notice


def test_a_plan_is_left_only_beside_a_run_that_has_a_feature_of_ours(located, tmp_path):
    with detect.using(NullDriver("no GPU here")):
        planned.check(located, []).keep()
        assert not (tmp_path / "output").exists(), "off means off"
        found = planned.check(located, ['--cache_config={"vae_cache_type": "unified_memory"}'])
        assert not (tmp_path / "output").exists(), "nothing is written before the run has the folder to itself"
    found.keep()
    assert quick.kept(tmp_path / "output") is not None
    assert [path.name for path in (tmp_path / "output" / "gh200").iterdir()] == ["plan.json"], "and no draft"


def test_the_plan_of_a_run_in_progress_stays_when_a_second_job_is_refused(located, tmp_path):
    output = tmp_path / "output"
    command = launching.LaunchCommand((sys.executable, "-m", "simpletuner_gh200.launch"), {})
    kept = []
    with run_lock.held(output), pytest.raises(GH200Error):
        launching.run(command, output, once_ours=lambda: kept.append(True))
    assert not kept


def test_the_report_shows_planned_against_measured(located, tmp_path):
    plan = quick.quick_plan(read_training(located, {}), MACHINES["gh200-96"])
    output = tmp_path / "output"
    recorded(output, used=2 * plan.table.held("train", "hbm"))
    assert planned.compared(read_run(output)) == [], "a run without a plan"
    quick.keep(plan, output)
    rows = {row[0]: row for row in planned.compared(read_run(output))}
    assert rows["HBM, most in use"][3] == "+100%"
    assert "a step, at least" in rows
    assert "Planned against measured" in build(output)


def test_a_run_on_a_device_calibrates_the_next_plan(located, tmp_path, private_cache):
    plan = quick.quick_plan(read_training(located, {}), MACHINES["gh200-96"])
    output = tmp_path / "output"
    quick.keep(plan, output)
    here = replace(MACHINES["gh200-96"], name="this")

    def learned() -> int:
        planned.learn({"output_dir": str(output)})
        return calibration.constants_for(here).context

    assumed = Constants().context
    assert learned() == assumed, "nothing was recorded yet"
    recorded(output, used=43 * GIB)
    assert learned() == assumed, "what torch reserved is not known"
    recorded(output, used=43 * GIB, reserved=40 * GIB)
    assert learned() == 3 * GIB
    again = make_plan(read_training(located, {}), here, trace=False)
    assert {row.source for row in again.table.rows if row.what == "context"} == {"assumed"}, "no refusal rests on it"


def test_nothing_is_learned_where_torch_reserves_memory_in_grace(located, tmp_path, private_cache):
    training = read_training(located, {}, flags=['--gh200_optimizations={"use_uvm": true}'])
    output = tmp_path / "output"
    quick.keep(quick.quick_plan(training, MACHINES["gh200-96"]), output)
    recorded(output, used=43 * GIB, reserved=40 * GIB)
    planned.learn({"output_dir": str(output)})
    assert calibration.constants_for(replace(MACHINES["gh200-96"], name="this")) == Constants()
