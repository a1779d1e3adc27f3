"""What the workers of these tests do: each job is a word, and what it asks for."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np


def workshop() -> Any:
    return serve


def serve(job: Any, content: bytes | None) -> tuple[Any, Any]:
    word, value = job
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        time.sleep(600)
    while word == "burn":
        pass
    if word == "raise":
        raise OSError(value)
    if word == "numbers":
        return os.getpid(), np.arange(value, dtype=np.float32).reshape(2, -1)
    return (word, len(content or b""), os.environ["OMP_NUM_THREADS"]), None
