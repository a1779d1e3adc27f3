"""A whole real run against its plan, through data, collate, trainer and optimizer; and what the run leaves for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.plan.planning import make_plan

PROBE = Path(__file__).with_name("probe_plan.py")


def test_a_run_takes_what_was_planned(workbench, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that it is traced now
    workbench.configure(max_train_steps=2, checkpoint_step_interval=50)
    plan = make_plan(read_training(Located.at(workbench.project.config), {}), this_machine())
    assert plan.notes == ()
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    first, measured = run.records[0]["measured"]
    assert first["earlier"] == 0
    assert measured["earlier"] == measured["gradients"] > 0, "SimpleTuner keeps gradients from one step to the next"
    rows = {(row.what, row.phase): row for row in plan.table.rows if row.pool == "grace"}
    foreseen = {what: rows[what, "train"].bytes for what in ("weights", "gradients", "optimizer", "activations")}
    assert foreseen["weights"] == pytest.approx(measured["weights"], rel=0.02)
    assert foreseen["gradients"] == pytest.approx(measured["gradients"], rel=0.02)
    assert foreseen["gradients"] + foreseen["activations"] == pytest.approx(measured["peak"], rel=0.02)
    assert plan.evaluated.placed.step.saved == pytest.approx(measured["saved"], rel=0.02)
    assert foreseen["optimizer"] == pytest.approx(run.records[0]["state"], rel=0.02)
    assert {rows[what, "train"].source for what in foreseen} == {"computed", "measured"}, "nothing here is a guess"
