"""The order in which backward asks for what was saved, learned for one bucket shape and followed from then on. Pure.

Backward asks in nearly the reverse order of saving, but for neighbours that are swapped, the same ones in each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

AT_LEAST, AT_MOST = 2, 4
"""So many are fetched ahead of use ..."""
AHEAD_BYTES = 512 << 20
"""... those beyond the least only while all of them together are no more than this."""


NOTHING = (0, 0)


@dataclass(frozen=True)
class Ahead:
    """A look-ahead walked through beforehand, once for all steps that go alike."""

    queue: tuple[int, ...]
    """What is fetched, in the order of asking."""
    window: dict[int, tuple[int, int]]
    """For each that is asked for: from where to where in the queue things should be on their way."""


class LearnedOrder:
    """Sizes in the order of saving, and indices into them in the order of asking."""

    def __init__(self, sizes: Sequence[int], asked: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.asked = tuple(dict.fromkeys(asked))
        self.position = {index: position for position, index in enumerate(self.asked)}
        self._ahead: tuple[tuple[int, ...], Ahead] | None = None

    def ahead(self, stayed: Sequence[int]) -> Ahead:
        """For steps in which these did not leave: the same in most, so the last one is kept."""
        key = tuple(stayed)
        if self._ahead is None or self._ahead[0] != key:
            self._ahead = key, self._walked(frozenset(key))
        return self._ahead[1]

    def _walked(self, stayed: frozenset[int]) -> Ahead:
        look, passed = LookAhead(self), 0
        queue: list[int] = []
        window: dict[int, tuple[int, int]] = {}
        if self.asked and self.asked[0] not in stayed:
            queue.append(self.asked[0])  # fetched on demand, unless another is asked for before it
        for index in self.asked:
            passed += index not in stayed
            queue += look.asked(index, lambda at: at not in stayed)
            window[index] = passed, len(queue)
        return Ahead(tuple(queue), window)


class LookAhead:
    """One backward pass along a learned order: what to fetch now, each thing once."""

    def __init__(self, order: LearnedOrder) -> None:
        self._sizes, self._asked, self._position = order.sizes, order.asked, order.position
        self._end = len(order.asked)
        self._next = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._bytes = 0

    def asked(self, index: int, wanted: Callable[[int], bool]) -> list[int]:
        """``index`` is asked for: the next few after it, as far as they are ``wanted``. None for a surprise."""
        position = self._position.get(index)
        if position is None:
            return []
        while self._ahead and self._ahead[0][0] <= position:
            self._bytes -= self._ahead.popleft()[1]
        if self._next <= position:
            self._next = position + 1
        found: list[int] = []
        while self._next < self._end:
            candidate = self._asked[self._next]
            size = self._sizes[candidate]
            held = len(self._ahead)
            if held >= AT_LEAST and (held >= AT_MOST or self._bytes + size > AHEAD_BYTES):
                break
            if wanted(candidate):
                self._ahead.append((self._next, size))
                self._bytes += size
                found.append(candidate)
            self._next += 1
        return found
