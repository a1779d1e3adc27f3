"""The child: one JSON request per line on standard input, one JSON answer per line on what was standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """``step``: one step of training; ``vae``: encoding and decoding; ``count``: parameters of a component."""
    from simpletuner_gh200.seams.trace import build, step

    if request["kind"] == "step":
        with build.trainer_for(request["options"]) as trainer:
            return step.traced(trainer, request)
    if request["kind"] == "vae":
        return dict(step.vae_work(request["model"], request["pixels"]))
    return {"parameters": step.count_parameters(request["model"])}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SimpleTuner prints while it is imported
    for line in sys.stdin:
        try:
            found: dict[str, Any] = answer(json.loads(line))
        except Exception as failed:  # noqa: BLE001 - whatever SimpleTuner or torch raises is the answer
            found = {"error": f"{type(failed).__name__}: {failed}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
