"""Baselines of real runs: two alike pass, one slowed on purpose is caught."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

import pytest

from simpletuner_gh200.operate.baseline import compare, regressed
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from tests.integration.workbench import probe

PROBE = probe("slow")
STEPS = 12


def record(workbench, folder: Path, *, pause: float | None = None) -> Recorded:
    workbench.restore()
    workbench.configure(max_train_steps=STEPS)
    environment = {"SIMPLETUNER_GH200_TELEMETRY": "1", "GH200_TEST_SLEEP": str(pause or 0.0)}
    run = workbench.train(env=environment, probe=PROBE)
    assert run.ok, run.explain()
    shutil.copytree(run.output / "gh200", folder)
    return read_run(folder)


@pytest.mark.one_release("4.")
def test_a_run_slowed_by_half_is_caught_and_an_equal_one_passes(workbench, tmp_path):
    first = record(workbench, tmp_path / "first")
    second = record(workbench, tmp_path / "second")
    usual = median(value for _step, value in first.series("step_seconds"))
    # Neighbours of a test machine come and go between two runs, so the tolerance is wide and the slowing plain.
    slowed = record(workbench, tmp_path / "slowed", pause=2 * usual)
    assert not regressed(compare(first, second, 0.6))
    found = {row.metric: row.judgement for row in compare(first, slowed, 0.3)}
    assert found["throughput (samples/s)"] == "worse"
