"""The engine: hooks on what autograd saves, between the forward pass that saves it and the backward pass that asks.

>>> offloader = Offloader(link, arena, minimum=MIB, room=DeviceRoom(...), rates=measured)
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
from simpletuner_gh200.model.activations.arena import Arena
from simpletuner_gh200.model.activations.link import Layout, Link
from simpletuner_gh200.model.activations.policy import Mix, Rates
from simpletuner_gh200.model.activations.recognise import LOW, PLAIN, Weights, identities
from simpletuner_gh200.model.activations.room import Room
from simpletuner_gh200.model.activations.shape import Shape
from simpletuner_gh200.model.activations.step import Saved, Step
from simpletuner_gh200.units import GIB

logger = logging.getLogger("simpletuner_gh200")

IN_FLIGHT = GIB
"""Bytes whose copies to Grace may be under way; beyond it the oldest is waited for, on the device.

One larger tensor goes alone."""
TOO_MANY = 3
"""Copies to Grace that failed, after which nothing more is sent."""
WHOLE = 2
"""A storage is copied whole unless it is so many times larger than the view."""
ALIGNED = 512
"""A part of a storage begins at a multiple of this, so that its views are aligned as they were."""


class Offloader:
    """One per rank. Counters are totals of the run."""

    def __init__(
        self,
        link: Link,
        arena: Arena,
        *,
        minimum: int,
        room: Room,
        rates: Rates | None = None,
        grace_limit: int = 1 << 62,
        in_flight: int = IN_FLIGHT,
        chosen: Callable[[Hashable, Shape], None] = lambda key, shape: None,
    ) -> None:
        """``chosen`` hears of each mix."""
        self._link = link
        self._arena = arena
        self.give_back = arena.give
        self._minimum = max(minimum, 1)
        self._room = room
        self._rates = rates
        self._grace_limit = grace_limit
        self._in_flight = in_flight
        self._chosen = chosen
        self._under_way: deque[Saved] = deque()
        self._sending = self._unsent = 0
        self._weights = Weights(())
        self._previous: Step | None = None
        self._none: dict[torch.dtype, torch.Tensor] = {}
        self._ordinal = -1 if link.device.type == "cpu" else link.device.index or 0
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
        known = self.shapes.setdefault(shape, Shape())
        self._choose(shape, known)
        if known.known:
            self._weights.refresh()
        else:
            self._weights = Weights(weights())
        if known.mix is None:
            self._room.begin()
        step = self.step_now = self._previous = Step(known, self._link)
        step.inputs = identities(inputs)
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
        """The step before is over: learn from it, and let go of what it left under way."""
        while self._under_way:
            self._release_oldest()
        step, self._previous = self._previous, None
        if step is not None:
            step.learn()
            self.surprises += step.surprised

    def mix_now(self, shape: Hashable) -> Mix | None:
        """What a step of this shape would do in the room that there is now; None: it was never measured."""
        self.finish()
        known = self.shapes.get(shape)
        if known is None:
            return None
        self._choose(shape, known)
        return known.mix

    def _choose(self, key: Hashable, shape: Shape) -> None:
        if not shape.measured:
            return
        room = self._room.bytes()
        if shape.mix is None or shape.room_differs(room):
            shape.choose(room=room, grace_limit=self._grace_limit, rates=self._rates)
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
        recompute = step.recomputes_next(self._arena.room())
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

    def _pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """What the node holds instead: (tensor, version), (saved, tensor), or (saved, layout) and maybe an offset."""
        self.tensors += 1
        step = self.step_now
        size = tensor.nbytes
        dtype = tensor.dtype
        if size < self._minimum or step is None or type(tensor) is not torch.Tensor or dtype not in PLAIN:
            return _as_it_is(tensor)
        storage = tensor.untyped_storage()
        key: Any = storage._cdata
        weights = self._weights
        if key in weights.storages or key in step.inputs or tensor.get_device() != self._ordinal:
            return _as_it_is(tensor)
        if weights.shapes and dtype in LOW and weights.copied_by_autocast(tensor):
            return _as_it_is(tensor)
        self.saved += size
        start, length = 0, storage.nbytes()
        if length > WHOLE * size:
            start, length = _part(tensor, length)
            if start or length != storage.nbytes():
                key = (key, start, length)
        version = tensor._version
        saved = step.by_storage.get(key)
        if saved is None or saved.version != version:
            stays = step.stays()
            stride = tensor.stride()
            layout: Layout = dtype, tensor.shape, stride
            if length != size or not tensor.is_contiguous():
                flat = dtype if not length % dtype.itemsize else torch.uint8
                layout = flat, (length // flat.itemsize,), (1,)
            step.held.append(storage._weak_ref())
            saved = step.by_storage[key] = Saved(self, step, length, start, version, layout, tensor.detach())
            if stays or not self._send(saved, storage.data_ptr() + start):
                self._blind(saved.witness)  # its bytes stay with the handles
            elif layout[2] is stride:
                return saved, layout
        else:
            self.shared += 1
        if saved.place is None:
            return saved, _apart(tensor)
        offset = tensor.storage_offset() - start // dtype.itemsize
        return saved, (dtype, tensor.shape, tensor.stride()), offset

    def _send(self, saved: Saved, address: int) -> bool:
        """Queue the copy to Grace. False: the tensor stays where it is."""
        if self._unsent >= TOO_MANY:
            return False
        while self._under_way and self._sending + saved.size > self._in_flight:
            self._release_oldest()
        place = self._arena.take(saved.size)
        if place is None:
            self.full += 1
            return False
        try:
            ticket = self._link.send(address, place[1], saved.size)
        except (MemoryRoomError, RuntimeError) as refused:
            self._send_failed(refused)  # the place is not used again: a copy may still write there
            return False
        saved.place = place
        self.moved += saved.size
        if ticket is None:
            self._blind(saved.witness)
            return True
        saved.source, saved.departure = saved.witness, ticket
        self._under_way.append(saved)
        self._sending += saved.size
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Let go of sources whose copies are done, as far as that is known without waiting."""
        while self._under_way:
            oldest = self._under_way[0]
            try:
                if oldest.departure is not None and not self._link.done(oldest.departure):
                    return
            except MemoryRoomError as refused:
                self._send_failed(refused)
                return
            oldest.departure = None
            self._release_oldest()

    def _release_oldest(self) -> None:
        """The current stream goes on after its copy; then its memory is free to be used again on that stream."""
        oldest = self._under_way.popleft()
        self._sending -= oldest.size
        if oldest.departure is not None:
            self._link.wait(oldest.departure)
            oldest.departure = None
        if oldest.source is not None:
            self._blind(oldest.source)
            oldest.source = None

    def _blind(self, tensor: torch.Tensor) -> None:
        """Drop the bytes, keep the version counter."""
        none = self._none.get(tensor.dtype)
        if none is None:
            none = self._none[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = none

    # -- backward ----------------------------------------------------------------------------------------

    def _unpack(self, handle: tuple[Any, ...]) -> torch.Tensor:
        saved = handle[0]
        if type(saved) is not Saved:
            version = handle[1]
            if version is not None and saved._version != version:
                raise _changed(saved.dtype, saved.shape, version, saved._version)
            return saved
        if saved.witness._version != saved.version:
            raise _changed(saved.layout[0], saved.layout[1], saved.version, saved.witness._version)
        if saved.step.measuring:
            self._read_needs_after_backward(saved.step)
        for later in saved.step.ask(saved):
            self._bring(later)
        layout = handle[1]
        if type(layout) is not tuple:
            return layout
        there = self._here(saved)
        offset = handle[2] if len(handle) > 2 else 0
        if saved.source is not None:  # the storage itself, not a copy of a part of it
            dtype, shape, stride = layout
            return torch.empty(0, dtype=dtype, device=self._link.device).set_(
                there.untyped_storage(), offset + saved.start // dtype.itemsize, shape, stride
            )
        if layout is saved.layout:
            return there
        dtype, shape, stride = layout
        return torch.as_strided(there if dtype is saved.layout[0] else there.view(dtype), shape, stride, offset)

    def _read_needs_after_backward(self, step: Step) -> None:
        """Once for each backward pass: what an optimizer step or a validation takes later is no need of this one's."""
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in step.backward_passes:
            step.backward_passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._room.end)

    def _here(self, saved: Saved) -> torch.Tensor:
        """Its bytes on the device, and the current stream behind their arrival."""
        if self._under_way:
            self._sweep()
        if saved.source is not None:
            return saved.source
        buffer = saved.buffer
        if buffer is None:
            self.late += 1
            buffer = self._bring(saved)
            if buffer is None:
                assert saved.place is not None
                buffer = saved.buffer = self._link.fetch(saved.place[1], saved.size, saved.layout)
                self.brought += saved.size
        if saved.arrival is not None:
            self.await_arrival(saved)
        return buffer

    def _bring(self, saved: Saved) -> torch.Tensor | None:
        assert saved.place is not None
        try:
            saved.buffer, saved.arrival = self._link.bring(saved.place[1], saved.size, saved.layout)
        except (MemoryRoomError, RuntimeError) as refused:
            self._failed("back from Grace", refused)
            return None
        self.brought += saved.size
        self.fetched += 1
        return saved.buffer

    # -- the end of a saved tensor, and of all -------------------------------------------------------------

    def await_arrival(self, saved: Saved) -> None:
        """The current stream's next work comes after what was fetched for it."""
        ticket, saved.arrival = saved.arrival, None
        if ticket is not None:
            self._link.wait(ticket, saved.buffer)

    def close(self) -> None:
        self.finish()
        if self._link.close():
            self._arena.close()

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


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes and version counter without the history: a node must not hold its own output."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def _as_it_is(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _apart(tensor), None if tensor.is_inference() else tensor._version


def _part(tensor: torch.Tensor, length: int) -> tuple[int, int]:
    """(first byte, bytes) of the storage that the view lies in, from an aligned beginning; all, where that is most."""
    item = tensor.element_size()
    first = tensor.storage_offset() * item
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) * item + item
    start = first // ALIGNED * ALIGNED
    part = min(first + reach, length) - start
    return (start, part) if WHOLE * part <= length else (0, length)


def _changed(dtype: torch.dtype, shape: Iterable[int], expected: int, found: int) -> RuntimeError:
    """As torch says it, with the operator whose gradient needs the tensor."""
    node = torch._C._current_autograd_node()
    operator = node.name() if node is not None else "an operator"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}], saved for {operator}, is at version {found}; expected version {expected} instead"
    )
