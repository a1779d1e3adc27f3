"""Weights of blocks in slots on the device, ahead of their use; their home is elsewhere.

>>> stream = WeightStream(find_blocks([model]), lane)
>>> stream.install([model])
>>> with stream.step():
...     prediction = model(batch)
>>> loss_of(prediction).backward()
>>> stream.go_home()

A block's weights are copied into a slot on a side stream when the block before it begins, in the order that was seen
last: a hint, never a promise, since whoever needs a block that is not there fetches it. While it is there its
parameters point into the slot, at home before and after. What autograd saves of a weight is kept as the parameter and
the view of it, so that backward reads the slot that holds it then, and asks for it in time.

Weights change where they live, in the optimizer step: nothing is copied home but what was written to in a slot all the
same, and what was written to at home is fetched again. A slot that somebody still looks at when it is to be used again
is left to him, and another takes its place: whatever was kept is right.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from simpletuner_gh200.memory.lane import Lane, Move, StillUnderWay, Ticket
from simpletuner_gh200.model.activations.saved_tensors import as_it_is, changed
from simpletuner_gh200.model.blocks import ModelBlock
from simpletuner_gh200.model.placement import SLOTS, staying
from simpletuner_gh200.model.tensors import storage_users, view_of

logger = logging.getLogger("simpletuner_gh200")


class Slot:
    """Device memory for one block at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.identity: int = memory.untyped_storage()._cdata
        self.block: ModelBlock | None = None
        self.filled: Ticket = None
        self.in_place = False
        """Do the block's parameters point here?"""
        self.used = 0
        self.views: list[torch.Tensor] = []
        """Of its block's parameters, once they point here."""
        self.versions: list[int] = []
        """Of the parameters when it was filled."""
        self.places: list[int] = []
        """Where they pointed then, or do since they point here."""
        self.shown: list[torch.Tensor] = []
        """What others have got as ``.data`` of its parameters; each counts versions of its own."""
        self._views: dict[int, list[torch.Tensor]] = {}
        """By kind of block."""

    def views_of(self, block: ModelBlock) -> list[torch.Tensor]:
        found = self._views.get(id(block.layouts))
        if found is None:
            made = zip(block.pieces, block.layouts, strict=True)
            found = [view_of(self.memory, layout, piece.offset // layout[0].itemsize) for piece, layout in made]
            self._views[id(block.layouts)] = found
        return found

    def changed(self) -> bool:
        """Has anything happened to its block's weights that neither filling it nor pointing them here has done?"""
        assert self.block is not None
        there = self.places != self.block.places() or self.versions != self.block.versions()
        return there or self.written_unseen()

    def written_unseen(self) -> bool:
        return any(data._version for data in self.shown)

    def alone(self) -> bool:
        """Does nobody but this slot look at its memory?"""
        mine = 1 + sum(map(len, self._views.values()))
        return storage_users(self.memory) <= mine


class SavedWeight:
    """What a node holds of a weight: which, at what version, and the view of it."""

    __slots__ = ("at", "block", "dtype", "number", "shape", "stream", "stride", "version")

    def __init__(self, stream: WeightStream, block: ModelBlock, number: int, tensor: torch.Tensor) -> None:
        self.stream, self.block, self.number = stream, block, number
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.at = tensor.storage_offset()
        """In a slot; the same in every one."""
        self.version = block.pieces[number].parameter._version  # ``.data`` of it counts for itself

    def there(self) -> torch.Tensor:
        """The view, of the place where the weight is now."""
        piece = self.block.pieces[self.number]
        if piece.parameter._version != self.version:
            raise changed(self.dtype, self.shape, self.version, piece.parameter._version)
        layout = self.dtype, self.shape, self.stride
        slot = self.stream.need(self.block)
        if slot is not None:
            return view_of(slot.views[self.number], layout, self.at)
        home = piece.parameter.data
        inside = self.at - piece.offset // self.dtype.itemsize
        start = home.storage_offset() * home.element_size() // self.dtype.itemsize
        return view_of(home, layout, start + inside)


class WeightStream:
    """One per rank, used by one thread at a time, as forward and backward are."""

    def __init__(
        self,
        blocks: Sequence[ModelBlock],
        lane: Lane,
        *,
        slots: int = SLOTS,
        released: Callable[[torch.Tensor], None] = lambda memory: None,
    ) -> None:
        """``released`` is shown the memory of a slot that nobody looks at any more."""
        self.blocks = list(blocks)
        self._lane = lane
        self._count = slots
        self._released = released
        self._slots: list[Slot] = []
        self._at: dict[ModelBlock | None, Slot] = {}
        self._owners = {piece.parameter: block for block in self.blocks for piece in block.pieces}
        self._by_storage: dict[int, Slot] = {}
        self._next: dict[tuple[ModelBlock | None, ModelBlock | None], ModelBlock] = {}
        """What came after two blocks in a row, when they last did."""
        self._met: dict[ModelBlock, None] = {}
        """In the order in which they were needed first."""
        self._now: ModelBlock | None = None
        self._before: ModelBlock | None = None
        self._turn = 0
        self._hooks: dict[ModelBlock | None, list[Any]] = {}
        """By block; those on models are nobody's."""
        self.streamed = self.late = self.failed = self.kept = 0
        """Bytes copied to slots; times that a block was not there; copies that failed; slots left to others."""

    @property
    def slot_bytes(self) -> int:
        return sum(slot.memory.numel() for slot in self._slots)

    # -- standing beside the model -----------------------------------------------------------------------

    def install(self, models: Iterable[nn.Module]) -> None:
        for block in self.blocks:
            self._hook(block)
        for model in models:
            self._hooks.setdefault(None, []).append(model.register_forward_hook(self._predicted, always_call=True))

    def _hook(self, block: ModelBlock) -> None:
        def about_to_run(module: nn.Module, args: Any) -> None:
            if block is not self._now:
                self.need(block)

        self._hooks[block] = [block.module.register_forward_pre_hook(about_to_run, prepend=True)]

    def remove(self) -> None:
        self.go_home()
        for hook in (hook for hooks in self._hooks.values() for hook in hooks):
            hook.remove()
        self._hooks.clear()

    def let_stay(self, budget: int) -> list[ModelBlock]:
        """The last blocks of the forward pass, as it was, are brought no more: as many as fit into ``budget`` bytes
        with what the others need. They are at home, wherever that will be."""
        self.go_home()
        met = {block: at for at, block in enumerate(self._met)}
        self.blocks.sort(key=lambda block: met.get(block, -1))
        first = len(self.blocks) - staying([block.size for block in self.blocks], budget, self._count)
        leaving, self.blocks = self.blocks[first:], self.blocks[:first]
        for block in leaving:
            for hook in self._hooks.pop(block):
                hook.remove()
        gone = set(leaving)
        self._next = {pair: block for pair, block in self._next.items() if not gone & {*pair, block}}
        if not self.blocks:
            self._slots.clear()
            self._by_storage.clear()
        return leaving

    def _predicted(self, module: nn.Module, args: Any, output: Any) -> None:
        """Without a backward pass to come the blocks have done their work."""
        if not torch.is_grad_enabled():
            self.go_home()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a forward pass with gradients."""
        self.go_home()
        with torch.inference_mode(False):
            first = self._next.get((None, None))
            if first is not None and self._fetch(first) is not None and self._count > 1:
                second = self._next.get((None, first))
                if second is not None:
                    self._fetch(second, beside=first)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        except BaseException:  # no backward pass comes, and others may want to save or change the weights
            self.go_home()
            raise

    # -- what autograd saves -----------------------------------------------------------------------------

    def recognise(self, tensor: torch.Tensor) -> SavedWeight | None:
        """What to hold in place of a view of a weight that is in a slot now; None for anything else."""
        try:
            slot = self._by_storage.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a sparse one has no storage
            return None
        if slot is None or slot.block is None or not slot.in_place:
            return None
        at = tensor.storage_offset() * tensor.element_size()
        return SavedWeight(self, slot.block, bisect.bisect_right(slot.block.offsets, at) - 1, tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        return self.recognise(tensor) or as_it_is(tensor)

    def shown(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Somebody has taken this ``.data`` of a parameter: what he writes to it is to be seen as well."""
        slot = self._at.get(self._owners.get(parameter))
        if slot is not None:
            slot.shown.append(data)

    # -- blocks come and go ------------------------------------------------------------------------------

    def need(self, block: ModelBlock) -> Slot | None:
        """The current stream's next work finds it in this slot, or else at its home."""
        if block is self._now and (there := self._at.get(block)) is not None:
            return there
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            if block is not self._now:
                self._next[self._before, self._now] = block
                self._before, self._now = self._now, block
                self._met.setdefault(block)
            slot = self._at.get(block)
            if slot is not None and not slot.in_place and slot.changed():
                self._empty(slot)
                slot = None
            if slot is None:
                self.late += 1
                slot = self._fetch(block)
            if slot is not None:
                self._enter(slot, block)
            later = self._next.get((self._before, block))
            if later is not None and later is not block and later not in self._at and self._count > 1:
                self._fetch(later, beside=block)
            return slot

    def go_home(self) -> None:
        """Every parameter is where it lives; what the slots hold does not count any more."""
        for slot in list(self._slots):
            self._empty(slot)
        self._now = self._before = None

    def _enter(self, slot: Slot, block: ModelBlock) -> None:
        self._turn += 1
        slot.used = self._turn
        if slot.filled is not None:
            self._lane.wait(slot.filled)
            slot.filled = None
        if not slot.in_place:
            slot.views = slot.views_of(block)
            for piece, view in zip(block.pieces, slot.views, strict=True):
                piece.parameter.data = view
            slot.places = block.places()
            slot.shown.clear()
            slot.in_place = True

    def _fetch(self, block: ModelBlock, beside: ModelBlock | None = None) -> Slot | None:
        """Queue its way into a slot; None where that failed, or where only ``beside`` has one."""
        slot = None
        try:
            slot = self._free_slot(beside)
            if slot is None:
                return None
            slot.filled = self._lane.copy(_moves(block, slot.memory.untyped_storage()), self._lane.here())
        except RuntimeError as refused:
            if slot is not None and isinstance(refused, StillUnderWay):
                self._drop(slot)
            self._failed(block, refused)
            return None
        slot.block, self._at[block] = block, slot
        slot.versions, slot.places = block.versions(), block.places()
        self._turn += 1
        slot.used = self._turn
        self.streamed += block.size
        return slot

    def _free_slot(self, beside: ModelBlock | None) -> Slot | None:
        """An empty one, another where there are too few, else the one whose block was not needed for longest."""
        for slot in self._slots:
            if slot.block is None:
                return slot
        if len(self._slots) == self._count:
            taken = [slot for slot in self._slots if slot.block is not beside]
            if not taken:
                return None
            oldest = min(taken, key=lambda slot: slot.used)
            self._empty(oldest)
            if oldest in self._slots:
                return oldest
        largest = max(block.size for block in self.blocks)
        slot = Slot(torch.empty(largest, dtype=torch.uint8, device=self._lane.device))
        self._slots.append(slot)
        self._by_storage[slot.identity] = slot
        return slot

    def _empty(self, slot: Slot) -> None:
        block = slot.block
        if block is None:
            return
        del self._at[block]
        if slot.in_place:
            if slot.changed():
                self._keep_changes(slot, block)
            for piece in block.pieces:
                piece.parameter.data = piece.home
            slot.in_place = False
        slot.block = None
        slot.shown.clear()
        if slot.filled is not None:  # fetched in vain: whoever has its memory next comes after it
            self._lane.wait(slot.filled)
            slot.filled = None
        if slot.alone():
            self._released(slot.memory)
        else:
            self.kept += 1
            self._drop(slot)

    def _keep_changes(self, slot: Slot, block: ModelBlock) -> None:
        """What was written to in the slot goes home, and what was given other memory lives there."""
        for piece, view, version in zip(block.pieces, slot.views, slot.versions, strict=True):
            if piece.parameter.data_ptr() != view.data_ptr():
                piece.settle()
            elif piece.parameter._version != version or slot.written_unseen():  # as by a step before ``go_home``
                piece.home.copy_(view)

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        del self._by_storage[slot.identity]

    def _failed(self, block: ModelBlock, refused: RuntimeError) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                "gh200: the weights of %s could not be prefetched, and are read in place: %s (said once)",
                block.name,
                str(refused),
            )


def _moves(block: ModelBlock, memory: torch.UntypedStorage) -> list[Move]:
    """Of its weights, from where they are now; what is held of a home keeps its address its own."""
    found: list[Move] = []
    for piece in block.pieces:
        parameter = piece.parameter
        if parameter.data_ptr() != piece.address or parameter.dtype is not piece.home.dtype:
            piece.settle()
        found.append(((memory, piece.offset), piece.spot, piece.size))
    return found


def unpacked(handle: Any) -> torch.Tensor:
    """Of what ``as_it_is`` gave: the tensor, unless it was changed since."""
    tensor: torch.Tensor = handle[0]
    if handle[1] is not None and tensor._version != handle[1]:
        raise changed(tensor.dtype, tensor.shape, handle[1], tensor._version)
    return tensor


def _unpack(handle: Any) -> torch.Tensor:
    return handle.there() if type(handle) is SavedWeight else unpacked(handle)
