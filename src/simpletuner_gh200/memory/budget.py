"""Byte budgets: one per placement class inside one per node. Taking is all or nothing, and giving back is safe twice.

>>> node = Budget("node 0", 400 * GIB)
>>> latents = node.part("latents", 300 * GIB)
>>> with latents.reserve(size): ...            # or keep the reservation and release() it
"""

from __future__ import annotations

import threading

from simpletuner_gh200.errors import BudgetExceeded
from simpletuner_gh200.units import format_bytes


class Reservation:
    """So many bytes of a budget, until released."""

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget: Budget | None = budget
        self.size = size

    def release(self) -> None:
        """Give the bytes back; the second time does nothing."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._give_back(self.size)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Budget:
    """``allowed`` bytes under the name ``what``; ``None`` counts without a limit. Safe from several threads."""

    def __init__(self, what: str, allowed: int | None, *, remedy: str | None = None) -> None:
        if allowed is not None and allowed < 0:
            raise ValueError(f"a budget can't be negative: {what} of {allowed} bytes")
        self.what = what
        self.allowed = allowed
        self.remedy = remedy
        self.used = 0
        self.peak = 0
        self._parent: Budget | None = None
        self._lock = threading.Lock()

    def part(self, what: str, allowed: int | None = None, *, remedy: str | None = None) -> Budget:
        """A budget inside this one: what it takes counts here too, and both limits hold."""
        child = Budget(what, allowed, remedy=remedy or self.remedy)
        child._parent, child._lock = self, self._lock
        return child

    @property
    def free(self) -> int | None:
        """Bytes that can still be taken here, None where nothing limits it."""
        limits = [level.allowed - level.used for level in self._levels() if level.allowed is not None]
        return min(limits) if limits else None

    def reserve(self, size: int) -> Reservation:
        """Take ``size`` bytes here and in every budget around, or raise BudgetExceeded and take nothing."""
        if size < 0:
            raise ValueError(f"can't reserve {size} bytes")
        with self._lock:
            for level in self._levels():
                if level.allowed is not None and level.used + size > level.allowed:
                    raise level._exceeded(size)
            for level in self._levels():
                level.used += size
                level.peak = max(level.peak, level.used)
        return Reservation(self, size)

    def _give_back(self, size: int) -> None:
        with self._lock:
            for level in self._levels():
                level.used -= size

    def _levels(self) -> list[Budget]:
        levels, level = [], self
        while True:
            levels.append(level)
            if level._parent is None:
                return levels
            level = level._parent

    def _exceeded(self, size: int) -> BudgetExceeded:
        assert self.allowed is not None
        held = f"{self.what} ({format_bytes(self.used)} of {format_bytes(self.allowed)} in use)"
        return BudgetExceeded(held, needed=size, allowed=self.allowed - self.used, remedy=self.remedy)
