"""Device staging, step by step: ordering between streams, copies, failure, cancellation, the end; and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from simpletuner_gh200.diagnostics.selftest.check import Bench, Check, expect
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.budget import Budget
from simpletuner_gh200.memory.mapping import map_anonymous
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.staging.buffers import DriverBuffers, TorchBuffers
from simpletuner_gh200.memory.staging.layout import Range
from simpletuner_gh200.memory.staging.stager import DeviceStager, Ticket
from simpletuner_gh200.units import MIB

ROW = 4096


@dataclass(frozen=True)
class _Byte:
    """A dtype of one byte, so that staging can be tested without torch."""

    itemsize: int = 1


@contextmanager
def _staging(bench: Bench, depth: int = 2) -> Iterator[tuple[DeviceStager, Slab]]:
    bench.need_device()
    slab = SlabMaker(bench.driver, Budget("selftest", None), ordinal=bench.ordinal, measured={}).make(
        MIB, label="selftest"
    )
    slab.array.reshape(-1, ROW)[:] = [[row % 251] for row in range(MIB // ROW)]
    stager = DeviceStager(bench.driver, DriverBuffers(bench.driver, bench.ordinal), depth=depth)
    try:
        yield stager, slab
    finally:
        stager.close()
        slab.close()


def _submit(stager: DeviceStager, slab: Slab, *rows: int) -> Ticket:
    return stager.submit(rows, [[Range(slab, row * ROW, (ROW,), _Byte()) for row in rows]])


def _content(bench: Bench, ticket: Ticket, rows: int) -> list[int]:
    """The first byte of each row as it is on the device, fetched on the stream the ticket was handed over to."""
    ticket.claim()
    address = ticket.address
    expect(address is not None, f"nothing was staged: {ticket.errors}")
    assert address is not None
    back = map_anonymous(rows * ROW)
    bench.driver.copy([(back.address, address, rows * ROW)], 0, bench.ordinal)
    bench.driver.synchronize_stream(0, bench.ordinal)
    return [int(value) for value in back.array()[::ROW]]


def _arrives(bench: Bench) -> str:
    with _staging(bench) as (stager, slab):
        tickets = [_submit(stager, slab, step, step + 7) for step in range(6)]
        for step, ticket in enumerate(tickets):
            found = _content(bench, ticket, 2)
            expect(found == [step, step + 7], f"batch {step} holds {found}")
        return f"6 batches: {stager.staged} ahead, {stager.inline} by the consumer"


def _any_order(bench: Bench) -> str:
    with _staging(bench, depth=1) as (stager, slab):
        tickets = [_submit(stager, slab, step) for step in range(5)]
        for step in (4, 0, 2, 1, 3):
            expect(_content(bench, tickets[step], 1) == [step], f"batch {step} is wrong")
    return "taken out of order at depth 1, no deadlock"


def _cancel(bench: Bench) -> str:
    with _staging(bench) as (stager, slab):
        for step in range(8):
            _submit(stager, slab, step).cancel()
        expect(_content(bench, _submit(stager, slab, 9), 1) == [9], "the batch after the cancelled ones is wrong")
    return "8 cancelled, the next one arrived"


def _closes(bench: Bench) -> str:
    with _staging(bench) as (stager, slab):
        pending = [_submit(stager, slab, step) for step in range(8)]
        started = time.monotonic()
        stager.close()
        seconds = time.monotonic() - started
        expect(seconds < 2.0, f"closing took {seconds:.1f} s")
        expect(_content(bench, pending[7], 1) == [7], "a ticket could not be waited for after closing")
    return f"closed in {seconds * 1000:.0f} ms, tickets still good"


def _ordering(bench: Bench) -> str:
    """Host -> device on one stream, an event, device -> host on another: without the wait the bytes would be old."""
    bench.need_device()
    driver, ordinal, size = bench.driver, bench.ordinal, 8 * MIB
    source, back = map_anonymous(size), map_anonymous(size)
    first, second, event = driver.create_stream(ordinal), driver.create_stream(ordinal), driver.create_event(ordinal)
    target = driver.alloc_device(size, ordinal)
    try:
        for value in range(1, 9):
            source.array()[:] = value
            driver.copy([(target, source.address, size)], first, ordinal)
            driver.record_event(event, first, ordinal)
            driver.wait_event(second, event, ordinal)
            driver.copy([(back.address, target, size)], second, ordinal)
            driver.synchronize_stream(second, ordinal)
            seen = int(back.array()[0]), int(back.array()[-1])
            expect(seen == (value, value), f"round {value}: the second stream saw {seen}")
    finally:
        driver.free(target, ordinal)
        driver.destroy_event(event, ordinal)
        driver.destroy_stream(first, ordinal)
        driver.destroy_stream(second, ordinal)
    return "8 rounds over two streams"


def _kernels(bench: Bench) -> str:
    """Kernels queued right behind ``wait``, never synchronized in between: one that overtook its copy sums wrongly."""
    import torch

    bench.need_device()
    bench.need(torch.cuda.is_available(), "torch sees no CUDA device")
    bench.need(not bench.emulated, "the emulated runtime has no kernels")
    rows = MIB // ROW
    slab = SlabMaker(bench.driver, Budget("selftest", None), ordinal=bench.ordinal, measured={}).make(
        MIB, label="selftest"
    )
    slab.array.reshape(rows, ROW)[:] = [[row % 251] for row in range(rows)]
    stager = DeviceStager(bench.driver, TorchBuffers(f"cuda:{bench.ordinal}"), depth=3)
    try:
        tickets = [
            stager.submit(step, [[Range(slab, (step + more) % rows * ROW, (ROW,), torch.uint8) for more in range(64)]])
            for step in range(rows)
        ]
        sums = [batch.sum(dtype=torch.int64) for ticket in tickets for batch in ticket.wait() if batch is not None]
    finally:
        stager.close()
    expected = [ROW * sum((step + more) % rows % 251 for more in range(64)) for step in range(rows)]
    wrong = sum(int(found) != value for found, value in zip(sums, expected, strict=True))
    expect(wrong == 0, f"{wrong} of {rows} batches were read before they were there")
    return f"{rows} batches, {stager.staged} staged ahead of their kernels"


def _bandwidth(bench: Bench) -> str:
    bench.need_device()
    bench.need(not bench.emulated, "speed means nothing on an emulated device")
    from simpletuner_gh200.diagnostics.bandwidth import measure

    to_device = measure(bench.driver, bench.ordinal, "to device")
    to_host = measure(bench.driver, bench.ordinal, "to host")
    bench.measured.update(to_device_bytes_per_s=to_device.rate, to_host_bytes_per_s=to_host.rate)
    return f"{to_device}, {to_host}"


CHECKS = (
    Check("staging.arrives", "batches arrive stacked, ahead of their use", _arrives),
    Check("staging.order", "batches can be taken in any order", _any_order),
    Check("staging.cancel", "cancelled batches make room", _cancel),
    Check("staging.close", "closing is quick and loses nothing", _closes),
    Check("staging.ordering", "an event orders two streams", _ordering),
    Check("staging.kernels", "torch's kernels read staged batches after they arrived", _kernels),
    Check("staging.bandwidth", "copy bandwidth, both directions", _bandwidth),
)
