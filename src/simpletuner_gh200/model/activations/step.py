"""One step's saved tensors: what each of them is, where its bytes are, and when it was asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.memory.lane import Lane, Ticket
from simpletuner_gh200.model.activations.saved_tensors import Layout, let_go
from simpletuner_gh200.model.activations.shape import MOST_ORDERS, NOTHING, Ahead, LearnedOrder, Measured, Shape

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.model.activations.arena import Place
    from simpletuner_gh200.model.activations.offload import Offloader

ANOTHER_BLOCK = 1.5
"""A block is started plainly while Grace has so many times the room that the largest one before it took."""
A_FEW, MOSTLY = 2, 0.25
"""So many, and that share of what was saved, may come late before an order is learned anew; a right one leaves one."""


class Saved:
    """The bytes of one storage at one version. It lives as long as a node of the graph holds one of its handles."""

    source: torch.Tensor | None = None
    """What was saved, while a copy still reads it."""
    place: Place | None = None
    """Where its bytes are in Grace; None: they stay where they are, with the handles."""
    departure: Ticket = None
    buffer: torch.Tensor | None = None
    """Its bytes on the device again."""
    arrival: Ticket = None

    def __init__(
        self, owner: Offloader, step: Step, size: int, start: int, version: int, layout: Layout, witness: torch.Tensor
    ) -> None:
        self.owner = owner
        self.step = step
        self.size = size
        self.start = start
        """Of the storage's bytes, the first that is copied."""
        self.version = version
        self.layout = layout
        """Of the buffer: the first tensor's own where it is all of the bytes, else flat."""
        self.witness = witness
        """Shares the version counter of what was saved, and soon no bytes with it."""
        self.index = len(step.sizes)
        step.sizes.append(size)
        step.refs.append(weakref.ref(self))
        if step.measuring:
            step.measure(size)

    def __del__(self) -> None:
        """Nobody will ask for it again; what still arrives for it must be there before its place is used anew."""
        if self.place is not None:
            if self.arrival is not None:
                self.owner.await_arrival(self)
            self.owner.give_back(self.place)


class Step:
    """From the forward pass to the end of the graph."""

    def __init__(self, shape: Shape, lane: Lane, weights: Mapping[int, Any], inputs: Mapping[int, Any]) -> None:
        """``weights``, ``inputs``: storages that never leave, with the weak references that keep their identities."""
        self.shape = shape
        self.some_stay = "keep" in shape.block_choices or "keep" in shape.other_choices
        self._lane = lane
        self.refs: list[weakref.ref[Saved]] = []
        self.sizes: list[int] = []
        self.stayed: list[int] = []
        """Of what was saved, the numbers of those that did not leave."""
        self.known: dict[Any, Saved | None] = dict.fromkeys((*weights, *inputs))
        """By storage, or by part of one; None: it belongs to weights or inputs, and never leaves."""
        self.held: list[int] = []
        """Weak references to the storages that ``known`` has got: while they are held, no other gets their identity."""
        self._inputs = inputs
        self.requested: list[int] = []
        self.late = 0
        """Of those that left, so many were not there when they were asked for."""
        self._ahead: Ahead | None = None
        self._next = 0
        self._early: dict[int, int] = {}
        """What was fetched ahead and not asked for yet -> its place in the queue, in that order."""
        self.surprised = self.complete = False
        self.measuring = shape.mix is None
        self.backward_passes: set[int] = set()
        """Whose end is waited for, to see what the step has needed; reentrant checkpoints have passes of their own."""
        self.measured: list[Measured] = []
        self._marks: list[tuple[Measured, Any, Any]] = []
        """Of each block that was timed, with its beginning and its end."""
        self._began: Any = lane.mark() if self.measuring else None
        self._ended: Any = None
        self.block: int | None = None
        """The block that runs now, counted from 0."""
        self.recomputing = False
        """Inside a block that checkpointing runs once more in backward, outside of any step: then as now, a checkpoint
        in it is checkpointing's own, or the two runs would differ in what they save."""
        self.blocks = self._others = self._largest = 0

    # -- forward -----------------------------------------------------------------------------------------

    def measure(self, size: int) -> None:
        """So much was saved, by the block that runs or between blocks."""
        if self.block is None:
            self.measured.append(Measured(saved=size, inside=False))
        else:
            self.measured[-1].saved += size

    def stays(self) -> bool:
        """Shall what is saved next stay in HBM?"""
        if self.block is not None:
            choices = self.shape.block_choices
            return self.block < len(choices) and choices[self.block] == "keep"
        choices, at = self.shape.other_choices, self._others
        self._others += 1
        return at < len(choices) and choices[at] == "keep"

    def recomputes_next(self, grace_room: int) -> bool:
        """Is the next block one to recompute? An unknown one is, where Grace has no room for another of its kind."""
        choices = self.shape.block_choices
        if not self.measuring:
            return self.blocks < len(choices) and choices[self.blocks] == "recompute"
        return bool(self._largest) and grace_room < ANOTHER_BLOCK * self._largest

    def begin_block(self, inputs: int, *, recomputed: bool) -> Any:
        """A block starts. One that is recomputed saves only its inputs, which count as nobody's."""
        at, self.blocks = self.blocks, self.blocks + 1
        if self.measuring:
            self.measured.append(Measured(inputs=inputs, recomputed=recomputed))
        if not recomputed:
            self.block = at
        return self._lane.mark() if self.measuring and not recomputed else None

    def end_block(self, began: Any) -> None:
        self.block = None
        if began is not None:
            part = next(part for part in reversed(self.measured) if part.inside)
            self._marks.append((part, began, self._lane.mark()))
            self._largest = max(self._largest, part.saved)

    @contextmanager
    def inside_recomputed(self) -> Iterator[None]:
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def end_forward(self, *, complete: bool) -> None:
        self.complete = complete
        self.block = None
        self.known.clear()
        self._inputs = {}
        let_go(self.held)
        self.held.clear()
        order = self.shape.order_like(self.sizes)
        self._ahead = order.ahead(self.stayed) if order is not None else None
        self.surprised = order is None and bool(self.shape.orders)
        if self.measuring:
            self._ended = self._lane.mark()

    # -- backward ----------------------------------------------------------------------------------------

    def ask(self, index: int) -> Sequence[Saved]:
        """It is needed now; what is to be fetched ahead. The order is a guess: torch promises none.

        Where it is another, nothing more is fetched than is there in vain already, so that the device never fills."""
        self.requested.append(index)
        ahead = self._ahead
        if ahead is None:  # this step teaches the order
            return ()
        early = self._early
        early.pop(index, None)
        passed, until = ahead.window.get(index, NOTHING)
        first = max(passed, self._next)
        if first >= until or (early and self._left_behind(passed)):
            return ()
        self._next = until
        found: list[Saved] = []
        for place in range(first, until):
            at = ahead.queue[place]
            saved = self.refs[at]()
            if saved is not None and saved.buffer is None and saved.source is None:
                early[at] = place
                found.append(saved)
        return found

    def _left_behind(self, passed: int) -> bool:
        """Is anything there that should have been asked for by now?"""
        for at, place in list(self._early.items()):
            if place >= passed:
                return False
            saved = self.refs[at]()
            if saved is not None and saved.buffer is not None:
                return True
            del self._early[at]  # nobody will, or it never came
        return False

    # -- afterwards --------------------------------------------------------------------------------------

    def learn(self) -> None:
        """What the step has taught about its shape, once it is over; without a backward pass, nothing.

        An order that left most of them late was another's, or that of a backward pass which broke off."""
        shape = self.shape
        if self._ahead is not None and self.late > A_FEW + MOSTLY * len(self.sizes):
            self._ahead, self.surprised = None, True
        shape.unsure = self.surprised
        if not self.complete or not self.requested:
            return
        if self.measuring and shape.mix is None:
            self._read_times()
            shape.measured = self.measured
        if self._ahead is None:
            shape.orders.insert(0, LearnedOrder(self.sizes, self.requested))
            del shape.orders[MOST_ORDERS:]

    def _read_times(self) -> None:
        for part, began, ended in self._marks:
            part.seconds = self._lane.seconds(began, ended)
        others = [part for part in self.measured if not part.inside]
        rest = self._lane.seconds(self._began, self._ended) - sum(part.seconds for part in self.measured)
        total = sum(part.saved for part in others)
        for part in others:  # between blocks nobody took the time: by bytes
            part.seconds = max(rest, 0.0) * part.saved / total if total else 0.0
