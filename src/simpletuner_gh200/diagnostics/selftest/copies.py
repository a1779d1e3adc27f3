"""Slabs of every kind, and copies from them to the device as batches take them: bytes, order, lifetimes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from simpletuner_gh200.diagnostics.check import Bench, expect, self_check
from simpletuner_gh200.memory.allocate import RequestedKind, SlabMaker, why_not_registered
from simpletuner_gh200.memory.lane import Copier, Lane, lanes, spot_of
from simpletuner_gh200.memory.slab import Bytes, Slab
from simpletuner_gh200.units import MIB, counted

ROW = 4096
ROWS = MIB // ROW
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "uint8", "bool")


# -- slabs -------------------------------------------------------------------------------------------------------


def _kind(kind: RequestedKind, bench: Bench) -> str:
    if kind == "registered":
        refusal = why_not_registered(bench.caps)
        bench.need(refusal is None, refusal or "")
    maker = SlabMaker(bench.driver, requested=kind, ordinal=bench.ordinal)
    with maker.make(MIB + 1, label="selftest") as slab:
        slab.array[:] = 7
        expect(slab.size == MIB + 1 and int(slab.array[-1]) == 7, "the slab is not exactly as requested")
        made, gone = slab.kind, weakref.ref(slab.region)
    del slab
    gc.collect()
    expect(gone() is None, "its memory is still held after closing")
    return f"{made}: {maker.choice.reason}"


# -- copies ------------------------------------------------------------------------------------------------------


def _slab(bench: Bench) -> Slab:
    """As training has it: shared, bound, registered. Every row full of its own number."""
    slab = SlabMaker(bench.driver, ordinal=bench.ordinal).make(MIB, label="selftest", shared=True)
    slab.array.reshape(ROWS, ROW)[:] = [[row % 251] for row in range(ROWS)]
    return slab


def _rows(slab: Slab, *rows: int) -> list[Bytes]:
    return [slab.bytes_at(row * ROW, ROW) for row in rows]


def _lanes(bench: Bench) -> tuple[Lane, Lane]:
    """Without a device host memory stands in."""
    import torch

    if bench.caps.mode == "none":
        return lanes(torch.device("cpu"))
    bench.need(torch.cuda.is_available(), "torch sees no CUDA device")
    return lanes(torch.device("cuda", bench.ordinal))


@contextmanager
def _copying(bench: Bench) -> Iterator[tuple[Copier, Slab]]:
    copier, slab = Copier(_lanes(bench)[1]), _slab(bench)
    try:
        yield copier, slab
    finally:
        copier.close()
        slab.close()


def _arrives(bench: Bench) -> str:
    """In every dtype that caches have, read in another order than they were copied in."""
    import torch

    with _copying(bench) as (copier, slab):
        batches = [copier.copy(_rows(slab, step, step + 7)) for step in range(len(DTYPES))]
        for step in reversed(range(len(DTYPES))):
            batch, dtype = batches[step], getattr(torch, DTYPES[step])
            expect(batch is not None, f"{DTYPES[step]}: nothing was copied")
            assert batch is not None
            rows = batch.view(dtype).cpu().view(torch.uint8).view(2, ROW)
            right = bool((rows[0] == step).all() and (rows[1] == step + 7).all())
            expect(right, f"{DTYPES[step]}: other bytes arrived")
        device = batches[0].device.type if batches[0] is not None else "no"
    return f"{len(DTYPES)} dtypes in {device} memory"


def _sources(bench: Bench) -> str:
    """A slab that is closed right behind the call has to last until its bytes are there."""
    with _copying(bench) as (copier, slab):
        short = _slab(bench)
        batch = copier.copy(_rows(short, 3, 9))
        short.close()
        del short
        expect(batch is not None and batch.cpu()[::ROW].tolist() == [3, 9], "the source went before its copy")
        copier.copy(_rows(slab, 1))
        expect(copier.under_way <= 1, f"still held: {counted(copier.under_way, 'batch', 'batches')}")
    return "kept until copied, then let go"


def _ordering(bench: Bench) -> str:
    """Host -> device on one stream, an event, device -> host on another: without the wait the bytes would be old."""
    import torch

    out, back = _lanes(bench)
    size = 8 * MIB
    source, target = (torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2))
    near = torch.empty(size, dtype=torch.uint8, device=out.device)
    for value in range(1, 9):
        source.fill_(value)
        there = back.copy([(spot_of(near), spot_of(source), size)], back.here())
        out.copy([(spot_of(target), spot_of(near), size)], there)
        out.settle()
        seen = int(target[0]), int(target[-1])
        expect(seen == (value, value), f"round {value}: the second stream saw {seen}")
    return "8 rounds over two streams"


def _kernels(bench: Bench) -> str:
    """Kernels queued right behind ``copy``, never synchronized in between: one that overtook its copy sums wrongly."""
    import torch

    with _copying(bench) as (copier, slab):
        batches = (copier.copy(_rows(slab, *((step + more) % ROWS for more in range(64)))) for step in range(ROWS))
        sums = [batch.sum(dtype=torch.int64) for batch in batches if batch is not None]
    expect(len(sums) == ROWS, f"{ROWS - len(sums)} of {ROWS} batches were not copied")
    expected = [ROW * sum((step + more) % ROWS % 251 for more in range(64)) for step in range(ROWS)]
    wrong = sum(int(found) != value for found, value in zip(sums, expected, strict=True))
    expect(wrong == 0, f"{wrong} of {ROWS} batches were read before they were there")
    return f"{ROWS} batches, each copied ahead of its kernel"


DEVICE, REAL = Bench.need_device, Bench.need_real_device
CHECKS = (
    self_check("slab.auto", "auto makes a slab and says why", partial(_kind, "auto")),
    self_check("slab.registered", "a registered slab", partial(_kind, "registered")),
    self_check("copy.arrives", "batches of every cached dtype arrive stacked in torch's memory", _arrives),
    self_check("copy.sources", "sources live until they are copied", _sources),
    self_check("copy.ordering", "an event orders two streams", _ordering, DEVICE),
    self_check("copy.kernels", "torch's kernels read batches after they arrived", _kernels, REAL),
)
