"""A slow background pass over what is held: memory that went bad is found before a step trains on it."""

from __future__ import annotations

import logging
import threading

from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.units import MIB

logger = logging.getLogger("simpletuner_gh200")

BYTES_PER_SECOND = 64 * MIB
PAUSE_SECONDS = 3600.0
"""Between passes."""


ROW_COST = 16 << 10
"""The interpreter's work for a file, however small, in bytes that could have been hashed instead."""


class Scrub:
    """Runs in one rank per node, since all map the same memory. What it finds is marked for every rank."""

    def __init__(
        self, dataset: StagedDataset, *, bytes_per_second: float = BYTES_PER_SECOND, pause: float = PAUSE_SECONDS
    ) -> None:
        self._dataset = dataset
        self._rate = bytes_per_second
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gh200-scrub", daemon=True)
        self.passes = 0
        self.damaged = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def one_pass(self) -> int:
        """Check every file once, at the given rate; how many were damaged."""
        found = owed = 0
        for row in range(self._dataset.count):
            if not self._dataset.check_row(row):
                found += 1
                logger.warning("gh200: the scrub found file number %d damaged in memory; it is read from disk now", row)
            owed += max(self._dataset.row_size(row), ROW_COST)
            # Sleep in useful portions: a pause per small file would be all overhead.
            if owed >= self._rate / 10:
                if self._stop.wait(owed / self._rate):
                    break
                owed = 0
        self.damaged += found
        return found

    def _run(self) -> None:
        while not self._stop.is_set():
            self.one_pass()
            self.passes += 1
            self._stop.wait(self._pause)
