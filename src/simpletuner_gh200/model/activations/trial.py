"""``auto`` against checkpointing: a few steps with and a few without, and what was faster stays.

Pure; times are handed in.

Steps of different shapes are never compared: each shape has its own times, and its vote counts by how often it came.
The two ways take turns, so that what slows the machine for a while slows both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median
from typing import Literal

Way = Literal["with", "without"]

TURN = 3
"""Steps in a row the same way; the first of them is not counted, since it pays for the change."""
ENOUGH = 4
"""Counted steps of one shape, each way; of all shapes together twice as many, each with one of its own shape."""
PATIENCE = 192
"""Steps after which half of that has to do."""


@dataclass(frozen=True)
class Verdict:
    way: Way
    gain: float | None
    """Share of a step's time that offloading saves (negative: costs); None where nothing could be compared."""
    why: str


class Trial:
    """Asked before each step which way to go, told afterwards how long it took."""

    def __init__(self) -> None:
        self._times: dict[Hashable, dict[Way, list[float]]] = defaultdict(lambda: {"with": [], "without": []})
        self._steps = 0
        self.verdict: Verdict | None = None

    def way(self) -> Way:
        if self.verdict is not None:
            return self.verdict.way
        return "with" if (self._steps // TURN) % 2 == 0 else "without"

    def took(self, shape: Hashable, seconds: float, *, counts: bool = True) -> None:
        """The step just gone, in the way that ``way`` said. ``counts``: false for one that was still learning."""
        if self.verdict is not None:
            return
        first_of_turn = self._steps % TURN == 0
        if counts and not first_of_turn:
            self._times[shape][self.way()].append(seconds)
        self._steps += 1
        compared = {shape: times for shape, times in self._times.items() if _pairs(times)}
        pairs = [_pairs(times) for times in compared.values()]
        if max(pairs, default=0) >= ENOUGH or sum(pairs) >= 2 * ENOUGH:
            self.verdict = decide(compared)
        elif self._steps >= PATIENCE:
            self.verdict = decide(compared if sum(pairs) >= ENOUGH else {})


def _pairs(times: dict[Way, list[float]]) -> int:
    return min(len(seconds) for seconds in times.values())


def decide(times: dict[Hashable, dict[Way, list[float]]]) -> Verdict:
    """From counted times by shape and way. Equal is as good as slower: what is simpler stays.

    The median over shapes as well as within one: a few steps with a validation in them decide nothing.
    """
    votes: list[tuple[float, int]] = []
    for ways in times.values():
        took, otherwise = median(ways["with"]), median(ways["without"])
        if otherwise > 0:
            votes.append((took / otherwise, sum(len(seconds) for seconds in ways.values())))
    if not votes:
        return Verdict("without", None, "no shape came often enough to compare")
    gain = 1 - _middle(votes)
    if gain > 0:
        return Verdict("with", gain, f"a step takes {gain:.1%} less time with activations in Grace")
    return Verdict("without", gain, f"a step takes {-gain:.1%} more time with activations in Grace")


def _middle(votes: list[tuple[float, int]]) -> float:
    """The median of values, each as often as its weight says."""
    return median(value for value, weight in votes for _ in range(weight))
