"""``python -m simpletuner_gh200.seams.rules``: what SimpleTuner itself would say of a configuration before any weights.

A question, JSON on standard input: ``{"values": {...}, "datasets": [...], "ranks": 2, "folder": ...}``, with nothing of
ours left in either; paths are relative to ``folder``. The answer, JSON on one line: ``{"refusals": [{"where": ...,
"what": ...}]}``. Nothing is written but in a folder that goes afterwards, and nobody outside is told.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from simpletuner_gh200.seams.rules.configuration import refusals

IMPORTED = ("simpletuner.helpers.training.trainer", "simpletuner.helpers.data_backend.factory")


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        question = json.load(sys.stdin)
        for name in IMPORTED:  # in the folder we were started in: it is where their log goes
            importlib.import_module(name)
        os.chdir(question["folder"])
        found = list(refusals(question["values"], question["datasets"], question["ranks"]))
        out.write(json.dumps({"refusals": found}) + "\n")


if __name__ == "__main__":
    main()
