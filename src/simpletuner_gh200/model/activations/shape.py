"""What is known of one bucket shape: its blocks as measured, the mix chosen for them, the order of backward. Pure.

The first step of a shape is measured: nothing is kept in HBM that can go, and blocks that would be checkpointed run
plainly as long as Grace has room for one more of them. The mix is then chosen from bytes and times, and chosen again
where the room in HBM has changed (optimizer state is born after the first steps).

Backward asks in nearly the reverse order of saving, but for neighbours that are swapped, the same ones in each step:
the order is learned in the first step, and followed from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simpletuner_gh200.model.activations.policy import Block, Choice, Mix, Rates, choose, counted

ROOM_CHANGED = 0.1
"""Share of the room by which it must differ before a mix is chosen anew."""
MOST_ORDERS = 8

AT_LEAST, AT_MOST = 2, 4
"""So many are fetched ahead of use ..."""
AHEAD_BYTES = 512 << 20
"""... those beyond the least only while all of them together are no more than this."""

NOTHING = (0, 0)


class Ahead(NamedTuple):
    """What is fetched ahead of use, the same for all steps that go alike."""

    queue: tuple[int, ...]
    """In the order of asking."""
    window: dict[int, tuple[int, int]]
    """For each that is asked for: from where to where in the queue things should be on their way."""


class LearnedOrder:
    """Sizes in the order of saving, and indices into them in the order of asking."""

    def __init__(self, sizes: Sequence[int], requested: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.requested = tuple(dict.fromkeys(requested))
        self._ahead: tuple[tuple[int, ...], Ahead] | None = None

    def ahead(self, stayed: Sequence[int]) -> Ahead:
        """For steps in which these did not leave: the same in most, so the last one is kept."""
        key = tuple(stayed)
        if self._ahead is None or self._ahead[0] != key:
            self._ahead = key, self._walked(frozenset(key))
        return self._ahead[1]

    def _walked(self, stayed: frozenset[int]) -> Ahead:
        queue = tuple(at for at in self.requested if at not in stayed)
        window: dict[int, tuple[int, int]] = {}
        passed = until = 0
        for index in self.requested:
            passed += index not in stayed
            until = max(until, passed)
            while until < len(queue) and self._may_all_be_there(queue[passed : until + 1]):
                until += 1
            window[index] = passed, until
        return Ahead(queue, window)

    def _may_all_be_there(self, ahead: Sequence[int]) -> bool:
        few = len(ahead) <= AT_MOST and sum(self.sizes[at] for at in ahead) <= AHEAD_BYTES
        return len(ahead) <= AT_LEAST or few


@dataclass
class Measured:
    """One block, or everything saved between blocks (``inside`` false, one thing at a time)."""

    saved: int = 0
    inputs: int = 0
    seconds: float = 0.0
    inside: bool = True
    recomputed: bool = False


@dataclass
class Shape:
    measured: list[Measured] = field(default_factory=list)
    """In the order of the forward pass."""
    mix: Mix | None = None
    room: int = 0
    orders: list[LearnedOrder] = field(default_factory=list)
    """The latest first. Steps of one shape can differ in what they save: each kind has its own."""
    unsure: bool = False
    """The last step was a surprise."""
    block_choices: tuple[Choice, ...] = ()
    other_choices: tuple[Choice, ...] = ()
    steps: int = 0

    @property
    def known(self) -> bool:
        return self.mix is not None and bool(self.orders) and not self.unsure

    def recomputes(self) -> frozenset[int]:
        return frozenset(at for at, choice in enumerate(self.block_choices) if choice == "recompute")

    def order_like(self, sizes: Sequence[int]) -> LearnedOrder | None:
        """A known order of steps that saved these ``sizes``, else of ones that saved as many things of other sizes.

        Batches of one shape may differ in the length of their captions, and backward asks for both alike."""
        wanted = tuple(sizes)
        alike = [known for known in self.orders if len(known.sizes) == len(wanted)]
        return next((known for known in alike if known.sizes == wanted), alike[0] if alike else None)

    def choose(self, *, room: int, grace_limit: int, rates: Rates | None) -> None:
        """Choose the mix; an order holds for mixes that recompute the same blocks, and is learned again for others."""
        inside = [part for part in self.measured if part.inside]
        measured = frozenset(at for at, part in enumerate(inside) if part.recomputed)
        before = measured if self.mix is None else self.recomputes()
        self.mix = choose(self._blocks(), hbm_room=room, grace_limit=grace_limit, rates=rates)
        self.room = room
        chosen = list(zip(self.measured, self.mix.choices, strict=True))
        self.block_choices = tuple(choice for part, choice in chosen if part.inside)
        self.other_choices = tuple(choice for part, choice in chosen if not part.inside)
        if self.recomputes() != before:
            self.orders.clear()

    def room_differs(self, room: int) -> bool:
        return abs(room - self.room) > ROOM_CHANGED * max(self.room, room)

    def _blocks(self) -> list[Block]:
        """A block that was recomputed while measuring is taken for another like the last that was not."""
        found: list[Block] = []
        like = Measured()
        for part in self.measured:
            if part.inside and not part.recomputed:
                like = part
            saved = like.saved if part.recomputed else part.saved
            seconds = like.seconds if part.recomputed else part.seconds
            found.append(Block(saved, seconds, min(part.inputs, saved), recomputable=part.inside))
        return found


def summary_of(shapes: Mapping[object, Shape]) -> list[dict[str, object]]:
    """JSON-ready: each shape's mix, as users ask for it."""
    return [
        {
            "shape": str(key),
            "steps": shape.steps,
            "blocks": counted(shape.block_choices),
            "kept_bytes": shape.mix.kept,
            "offloaded_bytes": shape.mix.offloaded,
            "recomputed_bytes": shape.mix.recomputed,
            "fits": shape.mix.fits,
            "why": shape.mix.why,
        }
        for key, shape in shapes.items()
        if shape.mix is not None
    ]
