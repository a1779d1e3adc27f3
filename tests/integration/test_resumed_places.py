"""Stock SimpleTuner, several ranks, resumed in the middle of an epoch: does each rank go on where it was?

Not before 4.9.3: in a data-parallel run only the first rank saves where it is in the dataset, and its random numbers.
`gh200 train` says so before such a resume (operate/checkpoints.py); this is what it says it from.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from simpletuner_gh200.operate.preflight import PLACES_KEPT
from tests.integration.workbench import JobResult, probe

PROBE = probe("places")
WORLD, BATCH, IMAGES = 2, 2, 24
STEPS, STOP = 4, 2
"""Of the six micro-batches that a rank's epoch has."""

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def runs(_prepared: Any) -> tuple[JobResult, JobResult]:
    """The whole run, and what follows its checkpoint in the middle; nothing of ours in either."""
    bench = _prepared
    bench.restore()
    bench.configure(max_train_steps=STEPS, checkpoint_step_interval=STOP, checkpoints_total_limit=9)
    whole = bench.known(stock=True, world=WORLD, probe=PROBE)
    assert whole.ok, whole.explain()
    bench.go_on_from(whole)
    shutil.rmtree(bench.project.output / f"checkpoint-{STEPS}")
    resumed = bench.train(stock=True, world=WORLD, probe=PROBE)
    assert resumed.ok, resumed.explain()
    return whole, resumed


def test_the_first_rank_goes_on_where_it_was(runs):
    whole, resumed = runs
    assert resumed.records[0]["known_after_loading"] == [STOP * BATCH]
    assert resumed.losses[0][:1] == whole.losses[0][STOP : STOP + 1]
    assert not twice(runs, rank=0)


def test_a_rank_after_the_first_does_so_from_the_release_on_that_the_warning_names(runs):
    whole, resumed = runs
    kept = Version(version("simpletuner")) >= PLACES_KEPT
    assert resumed.records[1]["known_after_loading"] == [STOP * BATCH if kept else 0]
    if kept:
        assert resumed.losses == [losses[STOP:] for losses in whole.losses], "two ranks' sums round alike in any order"
        assert not twice(runs, rank=1)
    else:
        assert resumed.losses[1] != whole.losses[1][STOP:]
        saved = {path.name for path in (whole.output / f"checkpoint-{STOP}").glob("random_states_*")}
        assert saved == {"random_states_0.pkl"}, "nothing was written for any other rank"


def twice(runs: tuple[JobResult, JobResult], rank: int) -> set[str]:
    """Images that a rank trained before the stop and again after it, within one epoch."""
    whole, resumed = runs
    before = {name for batch in whole.records[rank]["taken"][:STOP] for name in batch}
    return before & {name for batch in resumed.records[rank]["taken"][: STEPS - STOP] for name in batch}
