"""One checkpoint on its way from memory to the disk, as the ranks of the node that saved it see it."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.held.saved import MOST_STARTS, MemoryFolder, Order
from simpletuner_gh200.units import format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")


class Draining:
    """``leads``: does this rank own its node's folder, and start the process that copies?"""

    def __init__(self, folder: MemoryFolder, *, leads: bool) -> None:
        self.folder = folder
        self.order: Order | None = None
        """Of the one that is on its way."""
        self.safe: Order | None = None
        """Of the last one that got there."""
        self.lost = False
        """Was one given up?"""
        self.handed_over, self.seconds, self.waited = 0, 0.0, 0.0
        self._leads = leads
        self._drainer: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._failing: str | None = None

    def hand_over(self, order: Order) -> None:
        self.order, self._starts = order, 0
        self.handed_over += 1
        if self._leads:
            self.folder.give(order)
            self._drainer = self.folder.start_drainer()

    def landed(self) -> bool:
        """Is nothing on its way any more? Raises RunFailed where the disk has refused for too long."""
        if self.order is None:
            return True
        if self._leads:
            return self._ended(self.order)
        # The one that leads may not have said it yet, or be at the next one.
        current, told = self.folder.order(), self.folder.told()
        last = told.source if current is None and told is not None else None
        if self.order.source != last and (current is None or current.source == self.order.source):
            return False
        self.safe, self.order = self.order, None
        return True

    def wait(self, *, until: float | None = None, successor: str | None = None) -> bool:
        """Until it has landed; False where time, by the clock, ran out before. ``successor`` waits for it, too."""
        order, began = self.order, time.perf_counter()
        while not self.landed():
            if until is not None and time.time() > until:
                return False
            time.sleep(0.01)
        waited = time.perf_counter() - began
        if order is not None and successor is not None and waited > 0.1:
            self.waited += waited
            words = "gh200: the disk is too slow for checkpoints this often: %s waited %s for %s to be written"
            logger.warning(words, successor, format_seconds(waited), order.source)
        return True

    def told(self) -> dict[str, Any]:
        """For telemetry."""
        found: dict[str, Any] = {"drain_seconds": self.seconds, "safe": None}
        if self.safe is not None:
            found.update(safe=Path(self.safe.target).name, safe_age=time.time() - self.safe.saved_at)
        return found

    def _ended(self, order: Order) -> bool:
        assert self._drainer is not None
        ended = self._drainer.poll() is not None
        told = self.folder.told()
        if told is not None and told.failing not in (None, self._failing) and not told.given_up:
            self._failing = told.failing
            logger.warning("gh200: %s can't be written, and is tried again: %s", order.target, told.failing)
        if not ended:
            return False
        if self.folder.order() is not None:  # somebody has killed it
            self._starts += 1
            if self._starts > MOST_STARTS:
                raise RunFailed(f"{order.source} can't be copied to disk: the process that does it ends at once")
            self._drainer = self.folder.start_drainer()
            return False
        self.order, self._failing = None, None
        assert told is not None, "it is written before the order goes"
        if told.given_up:
            self.lost = True
            remedy = "free disk space or fix the disk; earlier checkpoints are unchanged"
            raise RunFailed(f"{order.target} could not be written: {told.failing}", remedy=remedy)
        self.safe = order
        self.seconds += told.seconds
        size, took = format_bytes(told.bytes), format_seconds(told.seconds)
        what = f"this node's part of {order.source}" if order.part > 0 else order.source
        logger.info("gh200: %s is on disk: %s in %s behind the run", what, size, took)
        return True
