"""``python -m simpletuner_gh200.launch``: one rank of a run, SimpleTuner's own ``train.py`` with the extension active.

What ``gh200 train`` starts in every rank, and what ``accelerate launch -m simpletuner_gh200.launch`` starts too.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from simpletuner_gh200.config.blocks import MemorySettings
from simpletuner_gh200.config.environment import LIFELINE, local_rank, rank, switched_off, text
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.background import left_behind
from simpletuner_gh200.operate.ending import Outcome, closing_line, closing_lines
from simpletuner_gh200.operate.preflight import check_rank
from simpletuner_gh200.seams.bootstrap import activate, active
from simpletuner_gh200.seams.rank import conclude, heard_by, run_rank
from simpletuner_gh200.telemetry.redact import printable, redact_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and say on standard error what came of it."""
    arguments = sys.argv[1:] if argv is None else argv
    if not _alone():
        return run_rank(arguments, _say)
    try:
        _check(arguments)
    except GH200Error as failure:
        _tell(str(failure))
        return failure.exit_code
    code = run_rank(arguments, _say)
    _say_how_it_ended()
    return code


def plain() -> None:
    """SimpleTuner's own ``train.py`` has begun to import it, with the extension on: it is checked and ends likewise."""
    if _alone():
        try:
            _check(sys.argv[1:])
        except GH200Error as failure:
            _tell(str(failure))
            raise SystemExit(failure.exit_code) from None
        atexit.register(_end_plain)  # before the extension's own: those that come first are called last
    vars(sys.modules["__main__"])["print"] = heard_by(activate())


def _end_plain() -> None:
    runtime, failure = active(), getattr(sys, "last_value", None)
    if runtime is None:
        return
    if isinstance(failure, Exception):
        runtime.outcome.fail(failure)
    conclude(runtime, _say)
    _say_how_it_ended()


def _alone() -> bool:
    """Was this rank started without ``gh200 train``, which checks first and has the last word?"""
    return not switched_off() and not text(LIFELINE) and not {"-h", "--help"}.intersection(sys.argv)


def _check(arguments: Sequence[str]) -> None:
    """One rank of a node speaks for all of it."""
    if local_rank() == 0:
        checked = check_rank(arguments, _tell)
        notes = [*checked.notes]
        if checked.settings.part(MemorySettings).memory == "auto":
            from simpletuner_gh200.operate import planned

            found = planned.check(checked.training, refuses=False)
            notes += found.notes
            os.environ.update(found.environment)
        for note in notes:
            _tell(note)


def _say_how_it_ended() -> None:
    """As `gh200 train` does."""
    runtime = active()
    if runtime is None:
        return
    summary = runtime.summary()
    for label, words in closing_lines(summary) if rank() == 0 else []:
        _tell(f"{label}: {words}")
    if last := closing_line(Outcome(1, [summary]), output=None, again="", resumes=False):
        _tell(last)


def _tell(words: str) -> None:
    _say(f"gh200: {redact_text(words)}")


def _say(words: str) -> None:
    print(printable(words, lines=True), file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the process. Where a job was left behind, Python would wait for its threads first, for ever."""
    if left_behind():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
