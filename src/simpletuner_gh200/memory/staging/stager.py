"""Bringing coming batches to the device on a side stream, ahead of the step that uses them.

>>> stager = DeviceStager(current(), TorchBuffers("cuda"), depth="auto")
>>> ticket = stager.submit(step + 1, [latents, embeds])   # groups of Range; returns at once, never blocks
>>> ...                                                   # the training step runs
>>> latents, embeds = ticket.wait()                       # one stacked device tensor per group
>>> stager.close()

``wait`` makes the caller's stream wait for just this batch, not the caller. Where a group could not be copied its
entry is None and ``ticket.errors`` says why; the others are there. Memory of a slab must not be rewritten between
``submit`` and ``wait``; it is kept alive meanwhile. A ticket that is dropped counts as cancelled. Without CUDA
(``TorchBuffers("cpu")``, null driver) it all works the same, with host memory standing in.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from simpletuner_gh200.errors import GH200Error, MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.staging.buffers import Buffer, Buffers
from simpletuner_gh200.memory.staging.handles import Handle, new_event, new_stream
from simpletuner_gh200.memory.staging.layout import Group, copies_of, lay_out
from simpletuner_gh200.memory.staging.pace import Pace
from simpletuner_gh200.memory.staging.schedule import Schedule, State

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")

DEFAULT_CAPACITY = 64
CLOSE_SECONDS = 1.0


class Ticket:
    """One batch on its way. ``wait`` for it once, or ``cancel`` it."""

    def __init__(self, stager: DeviceStager, key: int, batch: Hashable, groups: Sequence[Group]) -> None:
        self.batch = batch
        self.errors: dict[int, Exception] = {}
        """Group index -> why it is not there."""
        self._stager = stager
        self._key = key
        self._groups = tuple(tuple(group) for group in groups)
        self._layout = lay_out(self._groups)
        # Views hold the memory of their slabs, closed or not, until the copy is over.
        self._sources = [item.slab.bytes_at(item.offset, item.size) for group in self._groups for item in group]
        self._buffer: Buffer | None = None
        self._event: Handle | None = None

    def wait(self) -> list[torch.Tensor | None]:
        """The stacked tensors, ordered after their copies on the caller's stream; None for a group that failed."""
        self.claim()
        return [self._tensor(index) for index in range(len(self._groups))]

    def claim(self) -> None:
        """As ``wait``, for a caller that wants ``address`` instead of tensors."""
        self._stager._claim(self)

    @property
    def address(self) -> int | None:
        """Where on the device the batch begins, once claimed; None if it could not be staged."""
        return self._buffer.address if self._buffer is not None and not self.errors else None

    def cancel(self) -> None:
        """The batch is not wanted any more; nothing is left behind."""
        self._stager._forget(self._key)
        self._buffer = self._event = None

    def fail(self, indexes: Sequence[int], failure: Exception) -> None:
        for index in indexes:
            # Without its traceback, whose frames would hold the buffer for as long as somebody keeps the error.
            self.errors.setdefault(index, failure.with_traceback(None))

    def fail_all(self, failure: Exception) -> None:
        self.fail(range(len(self._groups)), failure)

    def _tensor(self, index: int) -> torch.Tensor | None:
        if index in self.errors or self._buffer is None:
            return None
        group = self._groups[index]
        return self._buffer.tensor(self._layout.offsets[index], (len(group), *group[0].shape), group[0].dtype)


class DeviceStager:
    """One side stream and one worker thread per device. Safe to use from several threads."""

    def __init__(
        self,
        driver: Driver,
        buffers: Buffers,
        *,
        depth: int | Literal["auto"] = "auto",
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._driver = driver
        self._buffers = buffers
        self._ordinal = buffers.ordinal
        self._pace = Pace(depth)
        self._schedule = Schedule(self._pace.depth, capacity)
        self._keys = itertools.count()
        self._queued: dict[int, Ticket] = {}
        self._unsettled: deque[Ticket] = deque()
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._last_taken: float | None = None
        self.staged = self.inline = self.failed = 0
        """Batches the worker brought, batches the consumer had to copy itself, groups that failed."""
        self._stream = new_stream(driver, self._ordinal)
        self._thread = threading.Thread(target=self._work, name="gh200-staging", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        return self._schedule.depth

    def hold_back(self) -> None:
        """One batch ahead at most from now on, however fast the consumer is: memory is short."""
        with self._changed:
            self._pace.fixed, self._pace.depth = True, 1
            self._schedule.depth = 1

    def submit(self, batch: Hashable, groups: Sequence[Group]) -> Ticket:
        """Queue a batch. Never blocks: with a full queue the copy happens in ``wait`` instead."""
        self._refuse_fork()
        ticket = Ticket(self, next(self._keys), batch, groups)
        with self._changed:
            if self._schedule.submit(ticket._key) is State.QUEUED:
                self._queued[ticket._key] = ticket
            self._changed.notify_all()
        weakref.finalize(ticket, self._forget, ticket._key).atexit = False
        return ticket

    def close(self) -> None:
        """Stop the worker, within about a second. Tickets that are out can still be waited for."""
        with self._changed:
            self._schedule.close()
            self._queued.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("gh200: a staging copy is still under way; its thread ends with it")
            return
        while self._unsettled:
            self._settle(self._unsettled.popleft())

    def _forget(self, key: int) -> None:
        with self._changed:
            self._schedule.cancel(key)
            self._queued.pop(key, None)
            self._changed.notify_all()

    # -- the worker --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # while waiting for the next one, hold nothing of the last

    def _next(self) -> Callable[[], object] | None:
        """A batch to bring; else one a consumer brought himself, whose sources are to be let go when it is done."""
        with self._changed:
            while not self._schedule.closed:
                key = self._schedule.start()
                if key is not None:
                    return partial(self._bring, self._queued.pop(key))
                if self._unsettled:
                    return partial(self._settle, self._unsettled.popleft())
                self._changed.wait()
        return None

    def _bring(self, ticket: Ticket) -> None:
        started = time.monotonic()
        try:
            self._queue_copies(ticket)
        except Exception as broken:  # noqa: BLE001 - a worker that dies would leave its consumer waiting
            ticket.fail_all(broken)
        with self._changed:
            wanted = self._schedule.finish(ticket._key)
            self.staged += wanted
            self.failed += len(ticket.errors)
            self._changed.notify_all()
        if self._settle(ticket):
            self._pace.copied(time.monotonic() - started)

    def _queue_copies(self, ticket: Ticket) -> None:
        """Queue every group's copies and an event behind them. A failing group is noted and the next one goes on."""
        try:
            buffer = self._buffers.take(max(ticket._layout.size, 1), self._stream.value)
            event = new_event(self._driver, self._ordinal)
        except (GH200Error, RuntimeError) as failed:  # torch's out-of-memory error is a RuntimeError
            ticket.fail_all(failed)
            return
        ticket._buffer, ticket._event = buffer, event
        for index, group in enumerate(ticket._groups):
            try:
                copies = copies_of(group, buffer.address + ticket._layout.offsets[index])
                self._driver.copy(copies, self._stream.value, self._ordinal)
            except GH200Error as failed:
                ticket.fail([index], failed)
        try:
            self._driver.record_event(event.value, self._stream.value, self._ordinal)
        except GH200Error as failed:
            # Without the event nobody can tell when the copies are done: none of them may be used.
            ticket.fail_all(failed)

    def _settle(self, ticket: Ticket) -> bool:
        """Wait until the copies are done, then let go of their sources. False if that can't be told."""
        event = ticket._event
        if event is None:
            return False
        try:
            self._driver.synchronize_event(event.value, self._ordinal)
        except MemoryRoomError as failed:
            logger.warning("gh200: the end of a staging copy could not be observed: %s", str(failed))
            return False
        ticket._sources.clear()
        return True

    # -- the consumer ------------------------------------------------------------------------------------

    def _claim(self, ticket: Ticket) -> None:
        self._refuse_fork()
        arrived = time.monotonic()
        with self._changed:
            claim = self._schedule.claim(ticket._key)
            while claim == "wait":
                self._changed.wait()
                claim = self._schedule.claim(ticket._key)
            self._queued.pop(ticket._key, None)
        if claim == "gone":
            raise MemoryRoomError(f"batch {ticket.batch!r} was cancelled or taken already")
        if claim == "yours":
            self._queue_copies(ticket)
            self.inline += 1
            self.failed += len(ticket.errors)
        self._hand_over(ticket)
        self._consumed(ticket, arrived, settle=claim == "yours")

    def _hand_over(self, ticket: Ticket) -> None:
        if ticket._event is None or ticket._buffer is None:
            return
        stream = self._buffers.consumer_stream()
        try:
            self._driver.wait_event(stream, ticket._event.value, self._ordinal)
            ticket._buffer.used_on(stream)
        except GH200Error as failed:
            ticket.fail_all(failed)

    def _consumed(self, ticket: Ticket, arrived: float, *, settle: bool) -> None:
        now = time.monotonic()
        with self._changed:
            self._schedule.take(ticket._key)
            closed = self._schedule.closed
            if settle and not closed:
                self._unsettled.append(ticket)
            if self._last_taken is not None:
                self._schedule.depth = self._pace.consumed(now - self._last_taken, now - arrived)
            self._last_taken = now
            self._changed.notify_all()
        if settle and closed:
            self._settle(ticket)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise MemoryRoomError(
                "device staging belongs to the process that started it, and this is a forked child",
                remedy="stage in the training process only",
            )
