"""The exit code tells the truth, also where SimpleTuner's train.py prints an exception and exits 0; and a traceback of
SimpleTuner's says once that the extension was there, and how to run without it."""

from __future__ import annotations

import pytest

from simpletuner_gh200.seams.outcome import MARK
from tests.integration.workbench import probe


def lines_about_us(log: str) -> list[str]:
    return [line for line in log.splitlines() if MARK in line]


def test_a_failure_inside_training_is_a_failure(workbench):
    run = workbench.train(probe=probe("failing_train"))
    assert run.exit_codes == [1]
    assert run.summaries[0]["status"] == "failed"
    assert run.summaries[0]["reason"] == "RuntimeError: planted failure", "SimpleTuner's own words, and no more"
    (line,) = lines_about_us(run.log())
    in_place = [name for name, status in run.summaries[0]["seams"].items() if status == "ok"]
    assert "trainer.train" in in_place
    for name in in_place:
        assert name.partition(".")[2] in line, f"{name} is in place and not named"
    assert "SIMPLETUNER_GH200=0" in line
    assert "`simpletuner train`" in line
    above = run.log().partition(line)[0].rstrip().splitlines()
    assert above[-1].endswith("RuntimeError: planted failure"), "it is a line of the traceback itself"


def test_a_failure_before_training_is_a_failure(workbench):
    workbench.configure(pretrained_model_name_or_path=str(workbench.project.folder / "nowhere"))
    run = workbench.train()
    assert run.exit_codes == [1]
    assert run.summaries[0]["status"] == "failed"


@pytest.mark.one_release("4.")
def test_the_kill_switch_leaves_stock_simpletuner(workbench):
    workbench.configure(validation_disable=True, disable_benchmark=True, max_train_steps=2)
    run = workbench.train(env={"SIMPLETUNER_GH200": "0"})
    assert run.summaries[0] == {"losses": []}, "a summary was left, so the extension was active"
    # Stock SimpleTuner on a machine without an accelerator: it gets as far as pinning its first batch.
    assert "pin_memory" in run.log() or "Cannot access accelerator" in run.log(), run.explain()
