"""A whole real run against its plan, through data, collate, trainer and optimizer; and what the run leaves for it."""

from __future__ import annotations

import contextlib
from statistics import median

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.operate import planned
from simpletuner_gh200.plan import planning
from simpletuner_gh200.plan.calibration import FEWEST, WARMING
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.plan.planning import make_plan
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.upstream.importing import check_import
from tests.integration.workbench import probe

PROBE = probe("plan")


@pytest.mark.one_release("4.")
def test_a_run_takes_what_was_planned(workbench, tmp_path, monkeypatch):
    options = check_import().table
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that it is traced now
    telemetry = {"gh200_optimizations": {"enable_uvm_hints": True}}
    workbench.configure(blocks=telemetry, max_train_steps=WARMING + FEWEST, checkpoint_step_interval=50)
    log = tmp_path / "debug.log"
    log.write_text("of a run that goes on\n")
    with contextlib.chdir(tmp_path):
        plan = make_plan(read_training(Located.at(workbench.project.config), {}, options=options), this_machine())
    assert log.read_text() == "of a run that goes on\n", "where SimpleTuner is imported it empties such a file"
    assert plan.notes == ()
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    first, measured = run.records[0]["measured"][:2]
    assert first["earlier"] == 0
    assert measured["earlier"] == measured["gradients"] > 0, "SimpleTuner keeps gradients from one step to the next"
    rows = {(row.what, row.phase): row for row in plan.evaluated.rows if row.pool == "grace"}
    foreseen = {what: rows[what, "train"].bytes for what in ("weights", "gradients", "optimizer", "activations")}
    assert foreseen["weights"] == pytest.approx(measured["weights"], rel=0.02)
    assert foreseen["gradients"] == pytest.approx(measured["gradients"], rel=0.02)
    assert foreseen["gradients"] + foreseen["activations"] == pytest.approx(measured["peak"], rel=0.02)
    assert plan.evaluated.placed.step.saved == pytest.approx(measured["saved"], rel=0.02)
    assert foreseen["optimizer"] == pytest.approx(run.records[0]["state"], rel=0.02)
    assert {rows[what, "train"].source for what in foreseen} == {"computed", "measured"}, "nothing here is a guess"

    assert plan.machine.rate_sources["from_files"] == "assumed"
    output = workbench.project.output
    planning.keep(plan, output)
    planned.learn({"output_dir": str(output)}, run.summaries[0])
    again = make_plan(
        read_training(Located.at(workbench.project.config), {}, options=options), this_machine(), trace=False
    )
    assert again.machine.rate_sources["from_files"] == f"measured: run {output.name}"
    waits = [step["data_wait_seconds"] for step in read_run(output).steps[WARMING:]]
    batch = plan.evaluated.facts.batch
    assert again.evaluated.seconds["data"] == pytest.approx(median(waits), rel=0.01), f"of {batch} samples"
