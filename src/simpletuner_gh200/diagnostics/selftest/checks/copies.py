"""Copies from slabs to the device, as batches take them: bytes, order between streams, failure, the end; bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from simpletuner_gh200.diagnostics.selftest.check import Bench, SelfCheck, expect
from simpletuner_gh200.memory.allocate import SlabMaker, give_back
from simpletuner_gh200.memory.copier import Copier, SlabRange, TorchMemory
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.mapping import Region, map_anonymous
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import MIB, counted

if TYPE_CHECKING:
    import torch

ROW = 4096
ROWS = MIB // ROW
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "uint8", "bool")


class DriverMemory:
    """Device memory straight from the driver, so that the copier can be tested where torch can't use the device.

    Freeing waits for pending work, so there is nothing to note when a buffer is handed over.
    """

    def __init__(self, driver: Driver, ordinal: int = 0) -> None:
        self._driver = driver
        self.ordinal = ordinal
        self.side_stream = driver.create_stream(ordinal)

    def take(self, size: int) -> Region:
        address = self._driver.alloc_device(size, self.ordinal)
        return Region(address, size, partial(give_back, self._driver, address, self.ordinal, os.getpid()))

    def address(self, buffer: Region) -> int:
        return buffer.address

    def consumer_stream(self) -> int:
        return 0

    def hand_over(self, buffer: Region) -> None:
        pass

    def close(self) -> None:
        self._driver.destroy_stream(self.side_stream, self.ordinal)


def _slab(bench: Bench) -> Slab:
    """As training has it: shared, bound, registered. Every row full of its own number."""
    slab = SlabMaker(bench.driver, ordinal=bench.ordinal, measured={}).make(MIB, label="selftest", shared=True)
    slab.array.reshape(ROWS, ROW)[:] = [[row % 251] for row in range(ROWS)]
    return slab


@contextmanager
def _copying(bench: Bench) -> Iterator[tuple[Copier[Region], Slab]]:
    bench.need_device()
    slab, memory = _slab(bench), DriverMemory(bench.driver, bench.ordinal)
    copier = Copier(bench.driver, memory)
    try:
        yield copier, slab
    finally:
        copier.close()
        memory.close()
        slab.close()


def _rows(slab: Slab, *rows: int) -> list[SlabRange]:
    return [SlabRange(slab, row * ROW, ROW) for row in rows]


def _content(bench: Bench, buffer: Region | None) -> list[int]:
    """The first byte of each row as it is on the device, fetched on the stream the buffer was handed over to."""
    expect(buffer is not None, "nothing was copied")
    assert buffer is not None
    back = map_anonymous(buffer.size)
    bench.driver.copy([(back.address, buffer.address, buffer.size)], 0, bench.ordinal)
    bench.driver.synchronize_stream(0, bench.ordinal)
    return [int(value) for value in back.array()[::ROW]]


def _arrives(bench: Bench) -> str:
    with _copying(bench) as (copier, slab):
        buffers = [copier.copy(_rows(slab, step, step + 7)) for step in range(6)]
        for step in (4, 0, 2, 1, 5, 3):
            found = _content(bench, buffers[step])
            expect(found == [step, step + 7], f"batch {step} holds {found}")
        expect(copier.failed == 0, f"{copier.failed} copies failed")
    return "6 batches, read in any order"


def _sources(bench: Bench) -> str:
    """A slab that is closed right behind the call has to last until its bytes are there."""
    with _copying(bench) as (copier, slab):
        short = _slab(bench)
        buffer = copier.copy(_rows(short, 3, 9))
        short.close()
        del short
        expect(_content(bench, buffer) == [3, 9], "the source went before its copy")
        copier.copy(_rows(slab, 1))
        expect(copier.under_way <= 1, f"still held: {counted(copier.under_way, 'batch', 'batches')}")
    return "kept until copied, then let go"


def _closes(bench: Bench) -> str:
    with _copying(bench) as (copier, slab):
        buffers = [copier.copy(_rows(slab, step)) for step in range(8)]
        started = time.monotonic()
        copier.close()
        seconds = time.monotonic() - started
        expect(seconds < 2.0, f"closing took {seconds:.1f} s")
        expect(copier.under_way == 0, f"still held: {counted(copier.under_way, 'batch', 'batches')}")
        expect(_content(bench, buffers[7]) == [7], "a batch was lost in closing")
    return f"closed in {seconds * 1000:.0f} ms, batches still good"


def _ordering(bench: Bench) -> str:
    """Host -> device on one stream, an event, device -> host on another: without the wait the bytes would be old."""
    bench.need_device()
    driver, ordinal, size = bench.driver, bench.ordinal, 8 * MIB
    maker = SlabMaker(driver, ordinal=ordinal, measured={})
    source, back = (maker.make(size, label=end, shared=True) for end in ("source", "back"))
    first, second, event = driver.create_stream(ordinal), driver.create_stream(ordinal), driver.create_event(ordinal)
    target = driver.alloc_device(size, ordinal)
    try:
        for value in range(1, 9):
            source.array[:] = value
            driver.copy([(target, source.address, size)], first, ordinal)
            driver.record_event(event, first, ordinal)
            driver.wait_event(second, event, ordinal)
            driver.copy([(back.address, target, size)], second, ordinal)
            driver.synchronize_stream(second, ordinal)
            seen = int(back.array[0]), int(back.array[-1])
            expect(seen == (value, value), f"round {value}: the second stream saw {seen}")
    finally:
        driver.free(target, ordinal)
        driver.destroy_event(event, ordinal)
        driver.destroy_stream(first, ordinal)
        driver.destroy_stream(second, ordinal)
        source.close()
        back.close()
    return "8 rounds over two streams"


def _torch_memory(bench: Bench) -> TorchMemory:
    import torch

    if bench.caps.mode == "none":
        return TorchMemory("cpu")
    bench.need(torch.cuda.is_available(), "torch sees no CUDA device")
    return TorchMemory(f"cuda:{bench.ordinal}")


def _dtypes(bench: Bench) -> str:
    """Into torch's own memory, as training does it; without a device host memory stands in."""
    import torch

    memory, slab = _torch_memory(bench), _slab(bench)
    copier = Copier(bench.driver, memory)
    try:
        for name in DTYPES:
            dtype: torch.dtype = getattr(torch, name)
            buffer = copier.copy(_rows(slab, 1, 200))
            expect(buffer is not None, f"{name}: nothing was copied")
            assert buffer is not None
            expect(buffer.device.type == memory.device.type, f"{name}: on {buffer.device}")
            rows = buffer.view(dtype).cpu().view(torch.uint8).view(2, ROW)
            expect(bool((rows[0] == 1).all() and (rows[1] == 200).all()), f"{name}: other bytes arrived")
    finally:
        copier.close()
    return f"{len(DTYPES)} dtypes in {memory.device.type} memory"


def _kernels(bench: Bench) -> str:
    """Kernels queued right behind ``copy``, never synchronized in between: one that overtook its copy sums wrongly."""
    import torch

    bench.need_device()
    bench.need(not bench.emulated, "the emulated runtime has no kernels")
    slab = _slab(bench)
    copier = Copier(bench.driver, _torch_memory(bench))
    try:
        batches = (copier.copy(_rows(slab, *((step + more) % ROWS for more in range(64)))) for step in range(ROWS))
        sums = [batch.sum(dtype=torch.int64) for batch in batches if batch is not None]
    finally:
        copier.close()
    expect(len(sums) == ROWS, f"{ROWS - len(sums)} of {ROWS} batches were not copied")
    expected = [ROW * sum((step + more) % ROWS % 251 for more in range(64)) for step in range(ROWS)]
    wrong = sum(int(found) != value for found, value in zip(sums, expected, strict=True))
    expect(wrong == 0, f"{wrong} of {ROWS} batches were read before they were there")
    return f"{ROWS} batches, each copied ahead of its kernel"


def _bandwidth(bench: Bench) -> str:
    bench.need_device()
    bench.need(not bench.emulated, "speed means nothing on an emulated device")
    from simpletuner_gh200.diagnostics.bandwidth import measure

    to_device = measure(bench.driver, bench.ordinal, "to device")
    to_host = measure(bench.driver, bench.ordinal, "to host")
    bench.measured.update(to_device_bytes_per_s=to_device.rate, to_host_bytes_per_s=to_host.rate)
    return f"{to_device}, {to_host}"


CHECKS = (
    SelfCheck("copy.arrives", "batches arrive stacked", _arrives),
    SelfCheck("copy.sources", "sources live until they are copied", _sources),
    SelfCheck("copy.close", "closing is quick and loses nothing", _closes),
    SelfCheck("copy.ordering", "an event orders two streams", _ordering),
    SelfCheck("copy.dtypes", "every cached dtype arrives in torch's memory", _dtypes),
    SelfCheck("copy.kernels", "torch's kernels read batches after they arrived", _kernels),
    SelfCheck("copy.bandwidth", "copy bandwidth, both directions", _bandwidth),
)
