"""``python -m simpletuner_gh200.launch``: one rank of a run, SimpleTuner's own ``train.py`` with the extension active.

What ``gh200 train`` starts in every rank, and what ``accelerate launch -m simpletuner_gh200.launch`` starts too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from simpletuner_gh200.seams.rank import run_rank
from simpletuner_gh200.telemetry.printable import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and say on standard error what came of it."""
    return run_rank(sys.argv[1:] if argv is None else argv, _say)


def _say(words: str) -> None:
    print(printable(words, lines=True), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
