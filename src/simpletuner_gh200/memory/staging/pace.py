"""How many batches to keep ahead: fixed, or following what copying and training steps are measured to take. Pure."""

from __future__ import annotations

import math
from typing import Literal

LEAST, MOST = 2, 8
"""Double-buffered at least; beyond a few batches more depth only costs memory."""

_SMOOTHING = 0.2


class Pace:
    """``depth`` is fixed by a number, or adapts with ``"auto"``."""

    def __init__(self, depth: int | Literal["auto"] = "auto") -> None:
        if depth != "auto" and depth < 1:
            raise ValueError(f"prefetch_depth: {depth} is below 1")
        self.fixed = depth != "auto"
        self.depth = LEAST if depth == "auto" else depth
        self._copy: float | None = None
        self._step: float | None = None

    def copied(self, seconds: float) -> None:
        """A batch took so long from the start of its copy to its last byte."""
        self._copy = _smoothed(self._copy, seconds)

    def consumed(self, since_last: float, waited: float) -> int:
        """A batch was taken so long after the one before, after so long a wait; returns the new depth."""
        self._step = _smoothed(self._step, max(since_last - waited, 0.0))
        if not self.fixed:
            self.depth = wanted_depth(self._copy, self._step, waited=waited, now=self.depth)
        return self.depth


def wanted_depth(copy: float | None, step: float | None, *, waited: float, now: int) -> int:
    """Enough batches ahead to hide one copy behind the steps, one more whenever the consumer had to wait."""
    if copy is None or step is None:
        return now
    if step <= 0:
        return MOST if waited > 0 else now
    enough = 1 + math.ceil(min(copy / step, MOST))
    if waited > 0.1 * step:
        enough = max(enough, now + 1)
    return max(LEAST, min(MOST, enough))


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)
