"""What is known of one bucket shape: its blocks as measured, the mix chosen for them, the order of backward. No torch.

The first step of a shape is measured: nothing is kept in HBM that can go, and blocks that would be checkpointed run
plainly as long as Grace has room for one more of them. The mix is then chosen from bytes and times, and chosen again
where the room in HBM has changed (optimizer state is born after the first steps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simpletuner_gh200.model.activations.order import LearnedOrder
from simpletuner_gh200.model.activations.policy import Block, Choice, Mix, Rates, choose

ROOM_CHANGED = 0.1
"""Share of the room by which it must differ before a mix is chosen anew."""
MOST_ORDERS = 8
ANOTHER_BLOCK = 1.5
"""A block is started plainly while Grace has so many times the room that the largest one before it took."""


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

    def learn_order(self, order: LearnedOrder) -> None:
        """It holds for mixes that recompute the same blocks."""
        self.orders.insert(0, order)
        del self.orders[MOST_ORDERS:]

    def order_like(self, sizes: Sequence[int]) -> LearnedOrder | None:
        """A known order of steps that saved these ``sizes``, else of ones that saved as many things of other sizes.

        Batches of one shape may differ in the length of their captions, and backward asks for both alike."""
        wanted = tuple(sizes)
        alike = [known for known in self.orders if len(known.sizes) == len(wanted)]
        return next((known for known in alike if known.sizes == wanted), alike[0] if alike else None)

    def choose(self, *, room: int, grace_limit: int, rates: Rates | None) -> None:
        """Choose the mix; the order stays while the same blocks are recomputed, and is learned again where not."""
        before = self._recomputed_when_measured() if self.mix is None else self.recomputes()
        blocks = self._blocks()
        self.mix = choose(blocks, hbm_room=room, grace_limit=grace_limit, rates=rates)
        self.room = room
        chosen = list(zip(self.measured, self.mix.choices, strict=True))
        self.block_choices = tuple(choice for part, choice in chosen if part.inside)
        self.other_choices = tuple(choice for part, choice in chosen if not part.inside)
        if self.recomputes() != before:
            self.orders.clear()

    def room_differs(self, room: int) -> bool:
        return abs(room - self.room) > ROOM_CHANGED * max(self.room, room)

    def _recomputed_when_measured(self) -> frozenset[int]:
        inside = [part for part in self.measured if part.inside]
        return frozenset(at for at, part in enumerate(inside) if part.recomputed)

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
    """JSON-ready: each shape's mix, as a person asks for it."""
    return [
        {
            "shape": str(key),
            "steps": shape.steps,
            "blocks": {choice: shape.block_choices.count(choice) for choice in ("keep", "offload", "recompute")},
            "kept_bytes": shape.mix.kept,
            "offloaded_bytes": shape.mix.offloaded,
            "recomputed_bytes": shape.mix.recomputed,
            "fits": shape.mix.fits,
            "why": shape.mix.why,
        }
        for key, shape in shapes.items()
        if shape.mix is not None
    ]
