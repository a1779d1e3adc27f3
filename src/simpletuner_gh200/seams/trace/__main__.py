"""The child: one JSON request per line on standard input, one JSON answer per line on what was standard output."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from simpletuner_gh200.seams.trace import build, step

    with build.trainer_for(request["options"]) as trainer:
        return asdict(step.extrapolated(trainer, request["model"], request))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SimpleTuner prints while it is imported
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
