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
    environment = {"SIMPLETUNER_GH200": "0", "CONFIG_BACKEND": "json", "CONFIG_PATH": str(workbench.project.config)}
    run = workbench.train(argv=[], env=environment)
    assert run.summaries[0] == {"losses": []}, "a summary was left, so the extension was active"
