"""``python -m simpletuner_gh200.launch``: one rank of a run, SimpleTuner's own ``train.py`` with the extension active.

What ``gh200 train`` starts in every rank, and what ``accelerate launch -m simpletuner_gh200.launch`` starts too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from simpletuner_gh200.config.environment import LIFELINE, local_rank, switched_off, text
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.background import left_behind
from simpletuner_gh200.operate.preflight import check_rank
from simpletuner_gh200.seams.rank import run_rank
from simpletuner_gh200.telemetry.redact import printable, redact_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and say on standard error what came of it."""
    arguments = sys.argv[1:] if argv is None else argv
    if _unchecked():
        try:
            for note in check_rank(arguments, _tell):
                _tell(note)
        except GH200Error as failure:
            _tell(str(failure))
            return failure.exit_code
    return run_rank(arguments, _say)


def _unchecked() -> bool:
    """Was this rank started without ``gh200 train``, which checks first? One rank of a node speaks for all of it."""
    return not switched_off() and not text(LIFELINE) and local_rank() == 0


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
