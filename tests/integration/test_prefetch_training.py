"""``prefetch_depth`` in a real run: SimpleTuner's own thread collates ahead, with a queue of that length."""

from __future__ import annotations

import pytest

from tests.integration.workbench import UNIFIED, probe

PROBE = probe("prefetch")
CACHES = {**UNIFIED, "fill": "start"}


@pytest.mark.one_release("4.")
def test_the_depth_is_the_queue_of_simpletuners_own_prefetching(workbench):
    workbench.configure(
        blocks={"cache_config": CACHES, "gh200_optimizations": {"prefetch_depth": 3}}, max_train_steps=4
    )
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    assert set(run.records[0]["queues"]) == {3}
    summary = run.summaries[0]
    assert summary["features"]["prefetch"] == "on"
    assert summary["details"]["prefetch"] == {"depth": 3}
    assert len(run.losses[0]) == 4
    assert all(cache["hits"] for cache in summary["details"]["caches"].values()), summary["details"]["caches"]
