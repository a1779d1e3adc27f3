"""How a rank ends: an interrupt is no failure, a full disk is named, and the summary finds its way."""

from __future__ import annotations

import errno
import json
import os
import signal
import traceback
from types import SimpleNamespace

import pytest

from simpletuner_gh200.errors import DatasetTooLarge, UsageError
from simpletuner_gh200.seams import outcome as outcomes
from simpletuner_gh200.seams import rank
from simpletuner_gh200.seams.features import telemetry
from simpletuner_gh200.seams.outcome import MARK, disk_full, how_to_run_without, mark
from simpletuner_gh200.seams.runtime import Launch, RunOutcome, Runtime
from simpletuner_gh200.upstream.features import ON


def train(tmp_path, script: str, monkeypatch) -> tuple[Runtime, list[str]]:
    file = tmp_path / "train.py"
    file.write_text(script)
    monkeypatch.setattr("sys.argv", ["test"])
    runtime, said = Runtime(Launch()), []
    with rank._Interrupts(hush=False) as interrupts:
        rank._train(file, runtime, [], said.append)
        interrupts.note(runtime)
    return runtime, said


INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize(
    "script",
    [
        INTERRUPTED,
        f"try:\n    {INTERRUPTED}except KeyboardInterrupt:\n    pass\n",
        f"try:\n    {INTERRUPTED}except KeyboardInterrupt:\n    raise OSError('unable to load weights') from None\n",
    ],
    ids=["let through", "swallowed", "turned into another"],
)
def test_an_interrupt_is_an_interrupt_whatever_upstream_makes_of_it(tmp_path, script, monkeypatch):
    runtime, _said = train(tmp_path, script, monkeypatch)
    assert runtime.outcome.status == "interrupted"
    assert runtime.outcome.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_disturb_the_closing(tmp_path, monkeypatch):
    closed = []

    def close(_runtime: Runtime) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        closed.append("to its end")

    monkeypatch.setattr(Runtime, "close", close)
    runtime, _said = train(tmp_path, INTERRUPTED, monkeypatch)
    assert closed == ["to its end"]
    assert runtime.outcome.status == "interrupted"


def test_an_ignored_interrupt_stays_ignored(tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runtime, _said = train(tmp_path, INTERRUPTED, monkeypatch)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert runtime.outcome.status == "not started"


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing central directory",
        "basic_ios::clear: iostream error",
        'Error while serializing: I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }',
    ],
    ids=["torch 2.9", "torch 2.14", "safetensors"],
)
def test_a_full_disk_is_the_cause_and_comes_last(monkeypatch, tmp_path, words):
    usage = {tmp_path: SimpleNamespace(free=4096)}
    monkeypatch.setattr(outcomes.shutil, "disk_usage", lambda folder: usage.get(folder, SimpleNamespace(free=1 << 40)))
    outcome = RunOutcome(output_dir=str(tmp_path / "not there yet"))
    outcome.fail(RuntimeError(words))
    assert outcome.reason.splitlines()[-1] == f"  cause: the disk of {outcome.output_dir} is full (4 KiB left)"
    outcome.fail(DatasetTooLarge("too large", needed=2, allowed=1))
    assert "cause" not in outcome.reason


def test_a_full_disk_is_found_behind_other_exceptions():
    failure = ValueError("could not save")
    failure.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert disk_full(failure, []) == "a disk is full, or its quota used up"
    assert disk_full(ValueError("something else"), []) is None
    assert disk_full(RuntimeError("PytorchStreamWriter failed"), []) is None, "another error of its writer"


def test_a_run_under_gh200_train_tells_its_summary_over_the_line():
    """Without it a completed run looks like a rank that exited without reporting why."""
    runtime, told = Runtime(Launch()), []
    runtime.lifeline = SimpleNamespace(part=lambda summary: told.append({"summary": summary}))
    runtime.outcome = RunOutcome(status="completed")
    rank._leave_summary(runtime)
    assert [message["summary"]["status"] for message in told] == ["completed"]


def ended_in(output, *, on: bool = True, **outcome) -> Runtime:
    runtime = Runtime(Launch())
    runtime.outcome = RunOutcome(output_dir=str(output), **outcome)
    runtime._on = (telemetry.FEATURE(),) if on else ()
    return runtime


def test_the_summary_is_in_the_output_folder_however_the_run_ended(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "gh200" / "summary.json"
    runtime = ended_in(tmp_path, status="failed", reason="hub_token=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH was refused")
    runtime._on[0].summary = lambda: {"share": float("nan"), "where": tmp_path, "by_step": {3: 1}}
    runtime.close()
    left = json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (left["status"], left["details"]["telemetry"]["share"]) == ("failed", None)
    assert "was refused" in left["reason"] and "hf_abc" not in left["reason"]
    runtime.outcome.interrupt_by_user()  # found out after the closing
    rank._leave_summary(runtime)
    assert json.loads(file.read_text())["status"] == "interrupted"
    assert [path.name for path in file.parent.iterdir()] == ["summary.json"], "no draft is left"
    runtime.forget_earlier_summary()
    assert not file.exists(), "the next run in this folder may be killed before it leaves one"


def test_other_ranks_and_runs_without_a_feature_leave_no_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    ended_in(tmp_path, on=False).close()
    ended_in("").close()
    monkeypatch.setenv("RANK", "1")
    ended_in(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_summary_is_a_warning(tmp_path, caplog):
    (tmp_path / "gh200").write_text("in the way")
    runtime = ended_in(tmp_path)
    runtime.forget_earlier_summary()
    runtime.close()
    assert "the run's summary could not be written" in caplog.text


# -- the one line on SimpleTuner's tracebacks ------------------------------------------------------------------


def test_the_line_names_every_seam_and_both_ways_out():
    line = how_to_run_without(["trainer.train", "collate.compute_latents", "trainer.init_hooks"])
    assert "trainer (train, init_hooks), collate (compute_latents)" in line
    assert "SIMPLETUNER_GH200=0" in line
    assert "`simpletuner train`" in line
    assert "\n" not in line


def test_an_exception_is_marked_once_and_keeps_its_words():
    failure = ValueError("upstream's own")
    mark(failure, ["trainer.train"])
    mark(failure, ["trainer.train"])
    text = "".join(traceback.format_exception(failure))
    assert text.count(MARK) == 1
    assert str(failure) == "upstream's own"


def test_our_own_errors_are_not_marked():
    failure = UsageError("ours", remedy="do it")
    mark(failure, ["trainer.train"])
    assert not hasattr(failure, "__notes__")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("raise KeyError('latents')\n", "the end of its traceback"),
        (
            "import traceback\ntry:\n    raise KeyError('latents')\nexcept Exception as e:\n"
            "    print(e)\n    print(traceback.format_exc())\n",
            "the end of what it prints",
        ),
    ],
    ids=["escapes", "swallowed by an older release"],
)
def test_what_upstream_fails_with_is_followed_by_it(tmp_path, monkeypatch, capsys, script, told):
    file = tmp_path / "train.py"
    file.write_text(script)
    monkeypatch.setattr("sys.argv", ["test"])
    runtime, said = Runtime(Launch()), []
    runtime.seams["trainer.train"].status = ON
    rank._train(file, runtime, [], said.append)
    assert rank.conclude(runtime, said.append) == 1
    last = [line for text in (*said, capsys.readouterr().out) for line in text.splitlines() if MARK in line]
    assert last == [how_to_run_without(["trainer.train"])], told
    assert runtime.outcome.reason == "KeyError: 'latents'"


# -- SimpleTuner's refusals --------------------------------------------------------------------------------------


def raised(room: str, failure: Exception) -> Exception:
    """As raised by a function of that module."""
    with pytest.raises(type(failure)) as caught:
        exec("raise failure", {"__name__": room, "failure": failure})
    return caught.value


REFUSED = "SimpleTuner None refuses it: crop must be closed"


@pytest.mark.parametrize(
    ("room", "failure", "status", "reason", "code"),
    [
        ("simpletuner.helpers", ValueError("crop must be\n closed"), "not started", REFUSED, 2),
        ("simpletuner.helpers", ValueError("crop"), "training", "ValueError: crop", 1),
        ("simpletuner_gh200.held", ValueError("crop"), "not started", "ValueError: crop", 1),
        ("simpletuner.helpers", OSError("crop"), "not started", "OSError: crop", 1),
        ("simpletuner.helpers", RuntimeError("crop"), "not started", "RuntimeError: crop", 1),
    ],
    ids=["SimpleTuner's", "while it trains", "ours", "a disk or a hub", "no judgement"],
)
def test_what_simpletuner_refuses_before_training_ends_with_2(monkeypatch, room, failure, status, reason, code):
    monkeypatch.setattr("simpletuner_gh200.upstream.rules.installed_version", lambda _name: None)
    outcome = RunOutcome(status=status)
    outcome.fail(raised(room, failure))
    assert (outcome.reason, outcome.exit_code) == (reason, code)
