"""``python -m simpletuner_gh200.seams.probe``: does the installed SimpleTuner import, and what are its options?

The answer is JSON, one line. A process of its own, because the import takes as long as importing torch and every
model of SimpleTuner, and may end anyhow. Importing the trainer is nearly all that reading the options costs.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from simpletuner_gh200.seams.options import read_options

TRAINER = "simpletuner.helpers.training.trainer"
"""What ``train.py`` of every release imports, and through it nearly all of SimpleTuner."""

LONGEST = 300


def probe() -> dict[str, Any]:
    """``cause``: why it does not import, or None; ``options``, or ``unread``: why its options could not be read."""
    try:
        importlib.import_module(TRAINER)
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever it raises is the answer
        return {"cause": innermost(failure)}
    try:
        return {"cause": None, "options": read_options().to_json()}
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - told; a run can do without
        return {"cause": None, "unread": innermost(failure)}


def innermost(failure: BaseException) -> str:
    """The exception that was first, in a line: lazy imports, transformers' for one, hide it behind their own."""
    while deeper := failure.__cause__ or (None if failure.__suppress_context__ else failure.__context__):
        failure = deeper
    words = " ".join(str(failure).split()).removesuffix(f" ({getattr(failure, 'path', None)})")
    return f"{type(failure).__name__}: {words}"[:LONGEST]


def main() -> None:
    """SimpleTuner colours whatever is printed once it is imported, so the answer has a way out of its own."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        out.write(json.dumps(probe()) + "\n")


if __name__ == "__main__":
    main()
