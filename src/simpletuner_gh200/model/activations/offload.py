"""The engine: hooks on what autograd saves, between the forward pass that saves it and the backward pass that asks.

>>> offloader = Offloader(lanes(device), arena, minimum=MIB, room=DeviceRoom(...), rates=measured)
>>> with offloader.step(shape_of(batch), weights, inputs=batch_tensors):
...     prediction = model(batch)
>>> loss_of(prediction).backward()

Each storage is copied once per version, whole unless the view needs less than half of it, and views are made again
with the strides they had, so that kernels and bits stay the same. Torch does not compare versions of what hooks have
packed; this does, and raises as torch would.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.lane import Lane, Spot, StillUnderWay, flat
from simpletuner_gh200.model.activations.arena import Arena, Room
from simpletuner_gh200.model.activations.policy import Mix, Rates
from simpletuner_gh200.model.activations.saved_tensors import (
    LOW,
    Layout,
    Weights,
    apart,
    as_it_is,
    changed,
    extent,
    identities,
    may_move,
)
from simpletuner_gh200.model.activations.shape import Shape
from simpletuner_gh200.model.activations.step import Saved, Step
from simpletuner_gh200.model.tensors import view_of
from simpletuner_gh200.units import GIB, MIB

logger = logging.getLogger("simpletuner_gh200")

IN_FLIGHT = GIB
"""Bytes whose copies to Grace may be under way; beyond it the oldest is waited for, on the device.

One larger tensor goes alone."""
TOO_MANY = 3
"""Copies to Grace that failed, after which nothing more is sent."""
SMALLEST = 64
"""Bytes below which a tensor stays whatever was asked for: what stands in for it would take more than it does."""
WAITING = 4
"""Steps whose backward pass may come after other steps' forward passes; what older ones have to teach is lost."""
MOST_SHAPES = 128
"""That are remembered; of a large model each takes about a megabyte. The one that was not seen for longest goes."""
UNKNOWN: Any = object()


class Offloader:
    """One per rank. Counters are totals of the run."""

    def __init__(
        self,
        lanes: tuple[Lane, Lane],
        arena: Arena,
        *,
        minimum: int,
        room: Room,
        rates: Rates | None = None,
        grace_limit: int = 1 << 62,
        in_flight: int = IN_FLIGHT,
        chosen: Callable[[Hashable, Shape], None] = lambda key, shape: None,
        recognise: Callable[[], Callable[[torch.Tensor], Any] | None] = lambda: None,
    ) -> None:
        """``chosen`` hears of each mix; ``recognise`` gives, for a step, who knows weights that are in slots."""
        self._out, self._back = lanes
        self.device = self._out.device
        self.arena = arena
        self.give_back = arena.give
        self._minimum = max(minimum, SMALLEST)
        self._room = room
        self.rates = rates
        self._grace_limit = grace_limit
        self._in_flight = in_flight
        self._chosen = chosen
        self._recognise = recognise
        self._in_slot: Callable[[torch.Tensor], Any] | None = None
        self._under_way: deque[Saved] = deque()
        self._sending = self._unsent = 0
        self._weights = Weights(())
        self._unlearned: deque[Step] = deque(maxlen=WAITING)
        self._empty = torch.empty_strided
        self._none = torch.empty(0, device=self.device)
        """In place of bytes that are gone; any type will do."""
        self._ordinal = -1 if self.device.type == "cpu" else self.device.index or 0
        self.step_now: Step | None = None
        self.shapes: dict[Hashable, Shape] = {}
        self.tensors = self.saved = self.moved = self.brought = 0
        self.fetched = self.late = self.surprises = self.shared = self.failed = self.full = 0

    # -- a step ------------------------------------------------------------------------------------------

    @contextmanager
    def step(
        self, shape: Hashable, weights: Callable[[], Iterable[torch.Tensor]], inputs: Iterable[torch.Tensor]
    ) -> Iterator[Step]:
        """Around a forward pass with gradients. ``weights`` are asked for where the shape is not known yet."""
        self.finish()
        known = self._remembered(shape)
        self._choose(shape, known)
        if known.known:
            self._weights.refresh()
        else:
            self._weights = Weights(weights())
        if known.mix is None:
            self._room.begin()
        step = self.step_now = Step(known, self._out, self._weights.storages, identities(inputs))
        self._in_slot = self._recognise()
        self._unlearned.append(step)
        known.steps += 1
        complete = False
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield step
            complete = True
        finally:
            self.step_now = None
            step.end_forward(complete=complete)

    def finish(self) -> None:
        """The step before is over: learn from it, and let go of what it left under way.

        One that was not asked for anything yet may still be, with the next one."""
        while self._under_way:
            self._release_oldest()
        for step in [step for step in self._unlearned if step.requested]:
            self._unlearned.remove(step)
            step.learn()
            self.surprises += step.surprised

    def _remembered(self, key: Hashable) -> Shape:
        known = self.shapes.pop(key, None) or Shape()
        self.shapes[key] = known
        if len(self.shapes) > MOST_SHAPES:
            del self.shapes[next(iter(self.shapes))]
        return known

    def mix_now(self, shape: Hashable) -> Mix | None:
        """What a step of this shape would do in the room that there is now; None: it was never measured."""
        self.finish()
        if shape not in self.shapes:
            return None
        known = self._remembered(shape)
        self._choose(shape, known)
        return known.mix

    def _choose(self, key: Hashable, shape: Shape) -> None:
        if not shape.measured:
            return
        room = self._room.bytes()
        if shape.mix is None or shape.room_differs(room):
            shape.choose(room=room, grace_limit=self._grace_limit, rates=self.rates)
            self._chosen(key, shape)

    def checkpoint(self, original: Callable[..., Any], function: Any, args: Any, options: Any, rest: Any) -> Any:
        """In place of gradient checkpointing: ``original`` for a block that is to be recomputed, else just the block.

        ``options`` are checkpointing's own keywords, ``rest`` the function's.
        """
        step = self.step_now
        if step is None or step.recomputing:
            return original(function, *args, **options, **rest)
        if "context_fn" in options:
            with step.inside_recomputed():
                return original(function, *args, **options, **rest)
        if step.block is not None:
            return function(*args, **rest)
        recompute = step.recomputes_next(self.arena.room())
        needed = sum(part.nbytes for part in args if isinstance(part, torch.Tensor) and part.requires_grad)
        began = step.begin_block(needed, recomputed=recompute)
        try:
            if not recompute:
                return function(*args, **rest)
            with step.inside_recomputed():
                return original(function, *args, **options, **rest)
        finally:
            step.end_block(began)

    # -- forward -----------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        """What the node holds instead: (tensor, version) of what stays; a Saved, or (Saved, view, offset) of it.

        Of a weight in a slot what its stream says."""
        self.tensors += 1
        if self._in_slot is not None and (weight := self._in_slot(tensor)) is not None:
            return weight
        step = self.step_now
        if step is None or not may_move(tensor, self._minimum):
            return as_it_is(tensor)
        storage = tensor.untyped_storage()
        saved = step.known.get(storage._cdata, UNKNOWN)
        if saved is None:
            return as_it_is(tensor)
        if saved is UNKNOWN or saved.version != tensor._version:
            if tensor.get_device() != self._ordinal:
                return as_it_is(tensor)
            if tensor.dtype in LOW and self._weights.copied_by_autocast(tensor):
                return as_it_is(tensor)
            key, start, length = extent(tensor, storage)
            if start or length != storage.nbytes():
                saved = step.known.get(key, UNKNOWN)
            if saved is UNKNOWN or saved.version != tensor._version:
                return self._save(step, tensor, storage, key, start, length)
        self.saved += tensor.nbytes
        self.shared += 1
        return _handle(saved, tensor)

    def _save(
        self, step: Step, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Any, start: int, length: int
    ) -> Any:
        """The first time that these bytes are saved: ``length`` of the storage's, from ``start``."""
        self.saved += tensor.nbytes
        dtype = tensor.dtype
        layout: Layout = dtype, tensor.shape, tensor.stride()
        whole = length == tensor.nbytes and tensor.is_contiguous()
        if not whole:
            plain = dtype if not length % dtype.itemsize else torch.uint8
            layout = plain, (length // plain.itemsize,), (1,)
        step.held.append(storage._weak_ref())
        saved = step.known[key] = Saved(self, step, length, start, tensor._version, layout, tensor.detach())
        if (step.some_stay and step.stays()) or not self._send(saved, (storage, start)):
            step.stayed.append(saved.index)
            saved.witness.data = self._none  # its bytes stay with the handles
        return saved if whole and saved.place is not None else _handle(saved, tensor)

    def _send(self, saved: Saved, source: Spot) -> bool:
        """Queue the copy to Grace. False: the tensor stays where it is."""
        if self._unsent >= TOO_MANY:
            return False
        size = saved.size
        while self._under_way and self._sending + size > self._in_flight:
            self._release_oldest()
        place = self.arena.take(size)
        if place is None:
            self.full += 1
            return False
        try:
            ticket = self._out.copy((((place[0].storage, place[1]), source, size),), self._out.here())
        except RuntimeError as refused:
            if not isinstance(refused, StillUnderWay):
                self.give_back(place)
            self._send_failed(refused)
            return False
        saved.place = place
        self.moved += size
        if ticket is None:
            saved.witness.data = self._none  # the bytes go, the version counter stays
            return True
        saved.source, saved.departure = saved.witness, ticket
        self._under_way.append(saved)
        self._sending += size
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Let go of sources whose copies are done, as far as that is known without waiting."""
        while self._under_way:
            oldest = self._under_way[0]
            try:
                if not self._out.done(oldest.departure):
                    return
            except RuntimeError as refused:
                self._send_failed(refused)
                return
            oldest.departure = None
            self._release_oldest()

    def _release_oldest(self) -> None:
        """The current stream goes on after its copy; then its memory is free to be used again on that stream."""
        oldest = self._under_way[0]
        if oldest.departure is not None:
            self._out.wait(oldest.departure)  # where that fails it stays the oldest, and keeps its memory
            oldest.departure = None
        self._under_way.popleft()
        self._sending -= oldest.size
        if oldest.source is not None:
            oldest.source.data = self._none
            oldest.source = None

    # -- backward ----------------------------------------------------------------------------------------

    def _unpack(self, handle: Any) -> torch.Tensor:
        if type(handle) is Saved:
            there = self._requested(handle)
            return there if handle.source is None else self._source(handle, handle.layout, 0)
        if type(handle) is not tuple:
            weight: torch.Tensor = handle.there()
            return weight
        saved, view = handle[0], handle[1]
        if type(saved) is not Saved:
            if view is not None and saved._version != view:
                raise changed(saved.dtype, saved.shape, view, saved._version)
            return saved
        there = self._requested(saved)
        if saved.place is None:
            return view
        return view_of(there, view, handle[2]) if saved.source is None else self._source(saved, view, handle[2])

    def _source(self, saved: Saved, layout: Layout, offset: int) -> torch.Tensor:
        """A view of the storage itself, whose copy is not done yet, and not of a copy of a part of it."""
        assert saved.source is not None
        dtype, shape, stride = layout
        storage = saved.source.untyped_storage()
        fresh = torch.empty(0, dtype=dtype, device=self.device)
        return fresh.set_(storage, offset + saved.start // dtype.itemsize, shape, stride)

    def _requested(self, saved: Saved) -> torch.Tensor:
        """Its bytes on the device, the current stream behind their arrival, and the next few on their way.

        Of what stayed, only that it is unchanged."""
        witness, step = saved.witness, saved.step
        if witness._version != saved.version:
            raise changed(saved.layout[0], saved.layout[1], saved.version, witness._version)
        if step.measuring:
            self._read_needs_after_backward(step)
        for later in step.ask(saved.index):
            self._bring(later)
        if self._under_way:
            self._sweep()
        if saved.place is None or saved.source is not None:
            return witness
        buffer = saved.buffer
        if buffer is None:
            self.late += 1
            step.late += 1
            buffer = self._bring(saved)
            if buffer is None:
                buffer = self._fetch(saved)
        if saved.arrival is not None:
            self.await_arrival(saved)
        return buffer

    def _read_needs_after_backward(self, step: Step) -> None:
        """Once for each backward pass: what an optimizer step or a validation takes later is no need of this one's."""
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in step.backward_passes:
            step.backward_passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._room.end)

    def _bring(self, saved: Saved) -> torch.Tensor | None:
        """Queue its way back; None where that failed."""
        assert saved.place is not None
        chunk, at = saved.place
        dtype, shape, stride = saved.layout
        try:
            buffer = self._empty(shape, stride, dtype=dtype, device=self.device)
            back = self._back
            ticket = back.copy((((buffer.untyped_storage(), 0), (chunk.storage, at), saved.size),), back.here())
        except RuntimeError as refused:
            self._failed("back from Grace", refused)
            return None
        saved.buffer, saved.arrival = buffer, ticket
        self.brought += saved.size
        self.fetched += 1
        return buffer

    def _fetch(self, saved: Saved) -> torch.Tensor:
        """The ordinary way, where the quick one failed."""
        assert saved.place is not None
        chunk, at = saved.place
        dtype, shape, stride = saved.layout
        there = flat((chunk.storage, at), saved.size).to(self.device, copy=True).view(dtype)
        saved.buffer = torch.as_strided(there, shape, stride)
        self.brought += saved.size
        return saved.buffer

    # -- the end of a saved tensor, and of all -------------------------------------------------------------

    def await_arrival(self, saved: Saved) -> None:
        """The current stream's next work comes after what was fetched for it."""
        if saved.arrival is not None:
            self._back.wait(saved.arrival, saved.buffer)
            saved.arrival = None

    def close(self) -> None:
        self.finish()
        try:
            self._out.settle()
            self._back.settle()
        except RuntimeError as unknown:  # so its memory must not go yet
            logger.warning("gh200: the end of copies of activations could not be seen: %s", str(unknown))
            return
        self.arena.close()

    def _failed(self, where: str, refused: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning("gh200: a saved tensor could not be copied %s: %s (said once)", where, str(refused))

    def _send_failed(self, refused: Exception) -> None:
        """One that can't be fetched ahead is fetched when it is needed; one that can't be sent fills HBM."""
        self._failed("to Grace", refused)
        self._unsent += 1
        if self._unsent == TOO_MANY:
            logger.warning("gh200: activations stay in HBM from here on: %d copies to Grace failed", self._unsent)


def _handle(saved: Saved, tensor: torch.Tensor) -> Any:
    """A view of what was saved."""
    if saved.place is None:
        return saved, apart(tensor), 0
    dtype = tensor.dtype
    return saved, (dtype, tensor.shape, tensor.stride()), tensor.storage_offset() - saved.start // dtype.itemsize


MEASURED = 64 * MIB


def measure_link(driver: Driver, arena: Arena, ordinal: int) -> Rates | None:
    """Bytes per second each way, as they are here: one node's are twice another's. None where that can't be had."""
    place = arena.take(MEASURED)
    if place is None:
        return None
    try:
        h2d, d2h = driver.copy_rates(place[0].storage.data_ptr() + place[1], MEASURED, ordinal)
    except MemoryRoomError as refused:
        logger.warning("gh200: the link could not be measured, so nothing is weighed against it: %s", str(refused))
        return None
    finally:
        arena.give(place)
    logger.info("gh200: the link gives %.0f GB/s to Grace and %.0f back", d2h / 1e9, h2d / 1e9)
    return Rates(d2h=d2h, h2d=h2d)
