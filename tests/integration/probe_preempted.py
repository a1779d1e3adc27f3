"""Plays the launcher of this rank, and sends the last rank a signal in the middle of a window, at micro-batch 5."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

MICRO_BATCH = 5


def install(record: dict[str, Any]) -> None:
    from accelerate import Accelerator

    from simpletuner_gh200.seams.lifeline import Lifeline

    ours, record["launcher"] = socket.socketpair()
    Lifeline.from_environment = classmethod(lambda cls, environment: cls(ours))  # the line is real, its end is here
    original = Accelerator.backward
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def backward(self: Any, loss: Any, **named: Any) -> None:
        original(self, loss, **named)
        if last and len(record["losses"]) == MICRO_BATCH:
            os.kill(os.getpid(), signal.SIGTERM)

    Accelerator.backward = backward
