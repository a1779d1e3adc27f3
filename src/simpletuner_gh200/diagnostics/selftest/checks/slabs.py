"""Slabs: every kind, its binding, sharing between ranks, and tensors on their bytes."""

from __future__ import annotations

import gc
import weakref

from simpletuner_gh200.cache.layout import parse
from simpletuner_gh200.cache.record import encode, tensor_maker
from simpletuner_gh200.diagnostics.selftest.check import Bench, SelfCheck, expect
from simpletuner_gh200.diagnostics.selftest.checks.copies import DTYPES
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.allocate import SlabMaker, copy_speeds
from simpletuner_gh200.memory.placement import Asked, choose_kind, refusal_of
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import MIB


def _kind(bench: Bench, asked: Asked) -> str:
    if asked != "auto":
        refusal = refusal_of(asked, bench.caps, ranks=1)
        bench.need(refusal is None, refusal or "")
    maker = SlabMaker(bench.driver, asked=asked, ordinal=bench.ordinal, measured={})
    with maker.make(MIB + 1, label="selftest") as slab:
        slab.array[:] = 7
        expect(slab.size == MIB + 1 and int(slab.array[-1]) == 7, "the slab is not exactly as asked for")
        record, gone = maker.records[0], weakref.ref(slab.region)
    del slab
    gc.collect()
    expect(gone() is None, "its memory is still held after closing")
    return f"{record.kind}: {record.reason}; {record.binding}"


def _auto(bench: Bench) -> str:
    return _kind(bench, "auto")


def _registered(bench: Bench) -> str:
    return _kind(bench, "registered")


def _managed(bench: Bench) -> str:
    return _kind(bench, "managed")


def _host(bench: Bench) -> str:
    return _kind(bench, "host")


def _measured(bench: Bench) -> str:
    bench.need_device()
    bench.need(not bench.emulated, "speed means nothing on an emulated device")
    speeds = copy_speeds(bench.driver, bench.ordinal)
    bench.need(bool(speeds), "only one kind of memory is reachable: nothing to compare")
    bench.measured.update({f"copy_from_{kind}_bytes_per_s": speed for kind, speed in speeds.items()})
    choice = choose_kind("auto", bench.caps, measured=speeds)
    return f"{choice.kind}: {choice.reason}"


def _several_ranks(bench: Bench) -> str:
    bench.need_device()
    try:
        SlabMaker(bench.driver, asked="managed", ranks=2, ordinal=bench.ordinal)
    except FeatureUnavailable as refused:
        return refused.message
    expect(False, "managed slabs were granted to two ranks")
    return ""


def _shared(bench: Bench) -> str:
    slab = Slab.shared(MIB, label="selftest")
    assert slab.fd is not None
    other, private = Slab.attach(slab.fd, MIB), Slab.attach(slab.fd, MIB, private=True)
    other.array[5] = 9
    private.array[5] = 1
    expect(int(slab.array[5]) == 9, "the mappings don't share their bytes, or a private write got through")
    return "one memory, two mappings, private writes kept apart"


def _cpu_views(bench: Bench) -> str:
    """Through the caches' own codec: what a hit hands to the model."""
    import torch

    for name in DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        value = torch.ones(15 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 5)
        record = encode(value)
        slab = Slab.anonymous(MIB, label="selftest")
        for offset, piece in record.pieces:
            slab.bytes_at(offset, piece.nbytes)[:] = piece
        view = parse(record.layout).build(tensor_maker(slab.bytes_at(0, MIB)))
        expect(view.data_ptr() == slab.address, f"{name}: the view is a copy")
        slab.close()
        same = view.dtype == dtype and bool((view.view(torch.uint8) == value.view(torch.uint8)).all())
        expect(same, f"{name}: other bytes, or the memory went before its view")
    return f"{len(DTYPES)} dtypes, alive after close"


CHECKS = (
    SelfCheck("slab.auto", "auto makes a slab and says why", _auto),
    SelfCheck("slab.registered", "a registered slab", _registered),
    SelfCheck("slab.managed", "a managed slab", _managed),
    SelfCheck("slab.host", "a plain slab", _host),
    SelfCheck("slab.measured", "auto's choice from a measured comparison", _measured),
    SelfCheck("slab.several_ranks", "managed slabs are refused to several ranks", _several_ranks),
    SelfCheck("slab.shared", "ranks share bytes, private writes stay private", _shared),
    SelfCheck("view.cpu", "CPU tensors of every cached dtype on the slab's bytes", _cpu_views),
)
