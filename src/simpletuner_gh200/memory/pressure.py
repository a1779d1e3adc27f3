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
    size: int
    give_back: Callable[[], None]


def in_order(reliefs: Iterable[Relief]) -> list[Relief]:
    return sorted(reliefs, key=lambda relief: (-relief.size, relief.name))


class PressureValve:
    """Told of the memory that is available, takes one step after the other, with time in between to see its effect."""

    def __init__(self, reliefs: Iterable[Relief], *, settle_seconds: float = 3.0) -> None:
        self._left = in_order(reliefs)
        self._settle = settle_seconds
        self._last: float | None = None
        self.given: list[str] = []

    @property
    def exhausted(self) -> bool:
        return not self._left

    def must_end(self, available: int, total: int, now: float) -> bool:
        """In a pool shared with the GPU: is it all but used up, with nothing to give back and no effect to wait for?"""
        settling = self._last is not None and now - self._last < self._settle
        return self.exhausted and not settling and available < end_mark(total)

    def observe(self, available: int, total: int, now: float) -> Relief | None:
        """Take the next step if memory is low and the last one has had its time; returns it."""
        settling = self._last is not None and now - self._last < self._settle
        if available >= low_mark(total) or settling or not self._left:
            return None
        relief = self._left.pop(0)
        self._last = now
        relief.give_back()
        self.given.append(relief.name)
        return relief
