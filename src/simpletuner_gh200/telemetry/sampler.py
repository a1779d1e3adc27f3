"""What is slow to ask (memory of host and device) is asked by a thread of its own, about once a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("simpletuner_gh200")

Source = Callable[[], Mapping[str, Any]]
"""Returns numbers by name; may raise, and is then asked no more."""

EVERY_SECONDS = 1.0


class Sampler:
    """``latest`` holds the newest answer of every source, by the source's name."""

    def __init__(self, sources: Mapping[str, Source], *, every: float = EVERY_SECONDS) -> None:
        self.latest: dict[str, Mapping[str, Any]] = {}
        self._sources = dict(sources)
        self._every = every
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Ask once right here, so that the first record has values, then go on in the background."""
        self.ask()
        self._thread = threading.Thread(target=self._run, name="gh200-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def ask(self) -> None:
        for name, source in list(self._sources.items()):
            try:
                self.latest[name] = source()
            except Exception as broken:  # noqa: BLE001 - a source must never reach training; said once, asked no more
                del self._sources[name]
                logger.warning("gh200: telemetry source %s is off: %s: %s", name, type(broken).__name__, broken)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.ask()
