"""Plays the launcher of this rank, and sends the last rank a signal in the middle of a window, at micro-batch 5."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

MICRO_BATCH = 5


def hear(rank: socket.socket, release: signal.Signals) -> None:
    """Till its last word, after which it waits to be let go."""
    heard = b""
    while b'"summary"' not in heard:
        heard += rank.recv(1 << 16)
    os.kill(os.getpid(), release)


def install(record: dict[str, Any]) -> None:
    from accelerate import Accelerator

    from simpletuner_gh200.seams.lifeline import RELEASE, Lifeline

    ours, theirs = socket.socketpair()
    record["launcher"] = theirs  # were it closed, this rank would end
    threading.Thread(target=hear, args=(theirs, RELEASE), daemon=True).start()
    Lifeline.from_environment = classmethod(lambda cls, environment: cls(ours))  # the line is real, its end is here
    original = Accelerator.backward
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def backward(self: Any, loss: Any, **named: Any) -> None:
        original(self, loss, **named)
        if last and len(record["losses"]) == MICRO_BATCH:
            os.kill(os.getpid(), signal.SIGTERM)

    Accelerator.backward = backward
