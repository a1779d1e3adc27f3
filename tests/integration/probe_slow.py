"""Slow every backward pass down by GH200_TEST_SLEEP seconds."""

from __future__ import annotations

import os
import time
from typing import Any


def install(record: dict[str, Any]) -> None:
    from accelerate import Accelerator

    original = Accelerator.backward
    pause = float(os.environ["GH200_TEST_SLEEP"])

    def backward(self: Any, loss: Any, **named: Any) -> None:
        time.sleep(pause)
        original(self, loss, **named)

    Accelerator.backward = backward
