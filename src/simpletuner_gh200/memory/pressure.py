"""Giving memory back before the kernel takes it: when, and in which order. Pure; whoever holds memory says how.

The kernel kills a process when nothing is left to reclaim. Long before that, what we hold only for speed is given
back, one step at a time, the largest first: caches, whose files are still there. Data that can't be had again (a
dataset that is read from memory only) is never touched: every step costs time, none costs a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simpletuner_gh200.memory.ceilings import end_mark, low_mark


@dataclass(frozen=True)
class Relief:
    """One thing that can be given back, once."""

    name: str
    size: Callable[[], int]
    """Asked when it counts: a cache may still be filling when training begins."""
    give_back: Callable[[], None]


class PressureValve:
    """Told of the memory that is available, takes one step after the other, with time in between to see its effect."""

    def __init__(self, reliefs: Iterable[Relief], *, settle_seconds: float = 3.0) -> None:
        self._left = list(reliefs)
        self._settle = settle_seconds
        self._last: float | None = None
        self.given: list[str] = []

    @property
    def exhausted(self) -> bool:
        return not self._left

    def _settling(self, now: float) -> bool:
        return self._last is not None and now - self._last < self._settle

    def must_end(self, available: int, total: int, now: float) -> bool:
        """In a pool shared with the GPU: is it all but used up, with nothing to give back and no effect to wait for?"""
        return self.exhausted and not self._settling(now) and available < end_mark(total)

    def observe(self, available: int, total: int, now: float) -> tuple[str, int] | None:
        """Take the next step if memory is low and the last one has had its time; what went back, and how much."""
        if available >= low_mark(total) or self._settling(now) or not self._left:
            return None
        size, relief = max(((relief.size(), relief) for relief in self._left), key=lambda one: one[0])
        self._left.remove(relief)
        self._last = now
        relief.give_back()
        self.given.append(relief.name)
        return relief.name, size
