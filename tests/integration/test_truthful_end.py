"""The exit code tells the truth, also where SimpleTuner's train.py prints an exception and exits 0."""

from __future__ import annotations

from pathlib import Path


def test_a_failure_inside_training_is_a_failure(workbench):
    run = workbench.train(probe=Path(__file__).with_name("probe_failing_train.py"))
    assert run.exit_codes == [1]
    assert run.summaries[0]["status"] == "failed"
    assert "RuntimeError: planted failure" in run.summaries[0]["reason"]


def test_a_failure_before_training_is_a_failure(workbench):
    workbench.configure(pretrained_model_name_or_path=str(workbench.project.folder / "nowhere"))
    run = workbench.train()
    assert run.exit_codes == [1]
    assert run.summaries[0]["status"] == "failed"


def test_the_kill_switch_leaves_stock_simpletuner(workbench):
    workbench.configure(validation_disable=True, disable_benchmark=True, max_train_steps=2)
    run = workbench.train(env={"SIMPLETUNER_GH200": "0"})
    assert run.summaries[0] == {"losses": []}, "a summary was left, so the extension was active"
    # Stock SimpleTuner on a machine without an accelerator: it gets as far as pinning its first batch.
    assert "pin_memory" in run.log() or "Cannot access accelerator" in run.log(), run.explain()
