"""What is known of a sample comes late through a queue of ``multiprocessing``, as on a machine that is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any


def install(record: dict[str, Any]) -> None:
    feed: Callable[..., None] = Queue._feed

    def late(buffer: Any, notempty: Any, send_bytes: Callable[[Any], None], *rest: Any) -> None:
        def send(message: Any) -> None:
            if b"crop_coordinates" in bytes(message):
                time.sleep(0.5)
            send_bytes(message)

        feed(buffer, notempty, send, *rest)

    Queue._feed = staticmethod(late)
