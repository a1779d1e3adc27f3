"""One rank of a run: the extension activated, SimpleTuner's own ``train.py`` run under it, and a truthful end.

Nothing is printed here: what users are to read goes to ``say``, at the moment it is known.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from simpletuner_gh200.config.environment import SUMMARY_FOLDER, rank, switched_off, text
from simpletuner_gh200.config.files import find_package, take
from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.seams.bootstrap import activate, point_at
from simpletuner_gh200.seams.lifeline import Lifeline
from simpletuner_gh200.seams.outcome import how_to_run_without
from simpletuner_gh200.seams.preemption import TRY_AGAIN, CheckpointWritten
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.telemetry.redact import redact_text

logger = logging.getLogger("simpletuner_gh200")

SIMPLETUNER_LOG = "debug.log"
"""In the working directory, where SimpleTuner keeps it."""

Say = Callable[[str], None]


def run_rank(arguments: Sequence[str], say: Say) -> int:
    """Train; the exit code is truthful whatever SimpleTuner makes of its own exceptions."""
    try:
        lifeline = Lifeline.from_environment(os.environ)
        if lifeline is not None:
            lifeline.hold()
        config, flags = take(list(arguments), "config")
        script = train_script()
        if config is not None:
            point_at(config)
    except GH200Error as failure:
        say(_spoken(failure))
        return failure.exit_code
    if switched_off():
        _run_script(script, flags)
        return 0
    runtime = activate(Launch(config_path=config, flags=tuple(flags)))
    runtime.lifeline = lifeline
    runtime.enters("starting")
    with _Interrupts(hush=lifeline is not None) as interrupts:
        _train(script, runtime, flags, say)
        interrupts.note(runtime)
        return conclude(runtime, say)


class _Interrupts:
    """Remembers that Ctrl-C came, and where: SimpleTuner's own handling of it leaves no trace."""

    def __init__(self, *, hush: bool) -> None:
        """``hush``: the launcher will say what there is to say, so the rest of the output is for the log."""
        self._hush = hush
        self._where: str | None = None

    def __enter__(self) -> _Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_failure: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._where is not None:
            return  # the launcher's patience is short; a second one must not disturb the closing
        self._where = "".join(traceback.format_stack(frame))
        if self._hush:
            _output_to_log()
            os.write(2, f"gh200: interrupted here:\n{self._where}".encode(errors="replace"))
        signal.default_int_handler(number, frame)

    def note(self, runtime: Runtime) -> None:
        """A run that was interrupted did not fail, whatever SimpleTuner made of it."""
        if self._where is not None and runtime.outcome.status != "completed":
            runtime.outcome.interrupt_by_user()


def _output_to_log() -> None:
    """What is printed from now on, tracebacks above all, goes to the end of SimpleTuner's own log, if it has one."""
    try:
        fd = os.open(SIMPLETUNER_LOG, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for output in (1, 2):
        os.dup2(fd, output)
    os.close(fd)


def _train(script: Path, runtime: Runtime, flags: list[str], say: Say) -> None:
    """SimpleTuner from its first line to the end of our closing; how it ended is in the runtime's outcome."""
    try:
        _run_script(script, flags, runtime)
    except CheckpointWritten as written:
        runtime.outcome.interrupt(str(written), TRY_AGAIN)
    except KeyboardInterrupt:
        runtime.outcome.interrupt_by_user()
    except SystemExit as stopped:
        _note_stop(runtime, stopped)
    except GH200Error as failure:
        say(_spoken(failure))
        runtime.outcome.fail(failure)
    except Exception as failure:  # noqa: BLE001 - said in full, as an unhandled one would be
        runtime.failed(failure)
        say(traceback.format_exc().rstrip())
    finally:
        try:
            runtime.close()
        except KeyboardInterrupt:
            logger.debug("gh200: interrupted while closing", exc_info=True)


def train_script() -> Path:
    """SimpleTuner's train.py, found without importing SimpleTuner."""
    package = find_package("simpletuner")
    if package is None:
        raise UsageError("SimpleTuner is not installed in this environment", remedy="gh200 setup")
    return package / "train.py"


def _run_script(script: Path, flags: list[str], runtime: Runtime | None = None) -> None:
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), None if runtime is None else {"print": heard_by(runtime)}, run_name="__main__")


def heard_by(runtime: Runtime) -> Callable[..., None]:
    """For ``train.py`` as its ``print``: up to 3.x it prints what a run dies of, and ends with 0."""

    def heard(*words: object, **options: Any) -> None:
        for word in words:
            if isinstance(word, Exception):
                runtime.failed(word)
        print(*words, **options)  # noqa: T201 - SimpleTuner's own words

    return heard


def _note_stop(runtime: Runtime, stopped: SystemExit) -> None:
    outcome = runtime.outcome
    if outcome.status in {"not started", "training"}:
        outcome.status, outcome.reason = "failed", f"SimpleTuner left with exit code {stopped.code}"
    if isinstance(stopped.code, int) and stopped.code:
        outcome.exit_code = stopped.code


def conclude(runtime: Runtime, say: Say) -> int:
    """Judge how it ended, leave the summary, and return the exit code."""
    outcome = runtime.outcome
    if outcome.status == "not started" and not runtime.seams["trainer.train"].ok:
        outcome.status = "completed"
        outcome.reason = "the seam trainer.train is off, so this is SimpleTuner's own word for it"
    if outcome.status == "not started":
        outcome.status = "failed"
        if outcome.reason is None:  # an older release has printed a traceback that passed no seam of ours
            outcome.reason = "SimpleTuner stopped before training began; its own message is above"
            say(how_to_run_without(runtime.seams_in_place))
    if outcome.status == "completed" and outcome.global_step < (outcome.max_train_steps or 0):
        outcome.reason = f"ended at step {outcome.global_step} of {outcome.max_train_steps}"
    if outcome.status == "completed" and outcome.reason:
        say(f"gh200: {outcome.reason}")
    _leave_summary(runtime)
    return 0 if outcome.status == "completed" else outcome.exit_code


def _leave_summary(runtime: Runtime) -> None:
    runtime.leave_summary()  # once more: how it ended is known only now
    folder = text(SUMMARY_FOLDER)
    if folder:
        Path(folder, f"rank-{rank()}.json").write_text(json.dumps(runtime.summary(), default=str), encoding="utf-8")
    if runtime.lifeline is not None:
        runtime.lifeline.part(runtime.summary())


def _spoken(failure: GH200Error) -> str:
    return f"gh200: {redact_text(str(failure))}"
