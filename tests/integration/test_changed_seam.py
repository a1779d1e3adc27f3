"""A SimpleTuner that changed at a seam: who asked for the feature is told and stopped, everyone else trains on."""

from __future__ import annotations

import pytest

from tests.integration.workbench import probe, ramp

PROBE = probe("changed_seam")
RAMP = ramp(2, 4, 2)


def test_a_feature_asked_for_stops_the_run_at_start(workbench):
    workbench.configure(blocks={"gh200_optimizations": RAMP})
    run = workbench.train(probe=PROBE)
    assert run.exit_codes == [2]
    reason = run.summaries[0]["reason"]
    assert "'ramp'" in reason
    assert "found Trainer.init_hooks(self, something_new); expected Trainer.init_hooks(self)" in reason
    assert not run.output.exists() or not list(run.output.glob("checkpoint-*"))


@pytest.mark.one_release("3.")
def test_without_it_training_is_stock_and_the_summary_names_the_seam(workbench):
    workbench.configure(max_train_steps=2)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    assert run.summaries[0]["seams"]["trainer.init_hooks"].startswith("off: seam 'trainer.init_hooks' does not match")
