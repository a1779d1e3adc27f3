"""Slabs: every kind, its budget, its binding, and views on the CPU and on the device."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from simpletuner_gh200.diagnostics.selftest.check import Bench, Check, expect
from simpletuner_gh200.errors import BudgetExceeded, FeatureUnavailable
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.budget import Budget
from simpletuner_gh200.memory.measure import copy_speeds
from simpletuner_gh200.memory.placement import Asked, choose_kind, refusal_of
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.views import cuda_view, reachable
from simpletuner_gh200.units import MIB

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "uint8", "bool")


def _kind(bench: Bench, asked: Asked) -> str:
    budget = Budget("selftest", 4 * MIB)
    if asked != "auto":
        refusal = refusal_of(asked, bench.caps, ranks=1)
        bench.need(refusal is None, refusal or "")
    maker = SlabMaker(bench.driver, budget, asked=asked, ordinal=bench.ordinal, measured={})
    with maker.make(MIB + 1, label="selftest") as slab:
        slab.array[:] = 7
        expect(slab.size == MIB + 1 and int(slab.array[-1]) == 7, "the slab is not exactly as asked for")
        record = maker.records[0]
    del slab
    gc.collect()
    expect(budget.used == 0, f"{budget.used} bytes are still in the budget after closing")
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
        SlabMaker(bench.driver, Budget("selftest", None), asked="managed", ranks=2, ordinal=bench.ordinal)
    except FeatureUnavailable as refused:
        return refused.message
    expect(False, "managed slabs were granted to two ranks")
    return ""


def _over_budget(bench: Bench) -> str:
    budget = Budget("selftest", MIB)
    maker = SlabMaker(bench.driver, budget, ordinal=bench.ordinal, measured={})
    try:
        maker.make(2 * MIB, label="selftest")
    except BudgetExceeded as refused:
        expect(budget.used == 0, "something stayed in the budget")
        return refused.message
    expect(False, "more than the budget was allocated")
    return ""


def _shared(bench: Bench) -> str:
    slab = Slab.shared(MIB, label="selftest")
    assert slab.fd is not None
    other, private = Slab.attach(slab.fd, MIB), slab.private()
    other.array[5] = 9
    private.array[5] = 1
    expect(int(slab.array[5]) == 9, "the mappings don't share their bytes, or a private write got through")
    return "one memory, two mappings, private writes kept apart"


def _cpu_views(bench: Bench) -> str:
    import torch

    slab = Slab.anonymous(MIB, label="selftest")
    for dtype in _dtypes():
        view = slab.tensor(256, (3, 5), dtype)
        expect(view.data_ptr() == slab.address + 256, f"{dtype}: the view is a copy")
        expect(view.dtype == dtype and view.device.type == "cpu", f"{dtype}: {view.dtype} on {view.device}")
    view = slab.tensor(0, (8,), torch.float32).fill_(2.0)
    slab.close()
    expect(float(view.sum()) == 16.0, "the memory went before its view")
    return f"{len(DTYPES)} dtypes, alive after close"


def _cuda_views(bench: Bench) -> str:
    import torch

    bench.need_device()
    bench.need(torch.cuda.is_available(), "torch sees no CUDA device")
    maker = SlabMaker(bench.driver, Budget("selftest", None), ordinal=bench.ordinal, measured={})
    slab = maker.make(MIB, label="selftest")
    refusal = reachable(slab, bench.caps)
    bench.need(refusal is None, refusal or "")
    for dtype in _dtypes():
        slab.tensor(256, (3, 5), dtype).view(torch.uint8).fill_(1)
        view = cuda_view(slab, 256, (3, 5), dtype, bench.caps)
        expect(view.is_cuda and view.data_ptr() == slab.address + 256, f"{dtype}: not a view on the device")
        expect(bool((view.cpu().view(torch.uint8) == 1).all()), f"{dtype}: the device sees other bytes")
    return f"{len(DTYPES)} dtypes on a {slab.kind} slab"


def _dtypes() -> list[torch.dtype]:
    import torch

    return [getattr(torch, name) for name in DTYPES]


CHECKS = (
    Check("slab.auto", "auto makes a slab and says why", _auto),
    Check("slab.registered", "a registered slab", _registered),
    Check("slab.managed", "a managed slab", _managed),
    Check("slab.host", "a plain slab", _host),
    Check("slab.measured", "auto's choice from a measured comparison", _measured),
    Check("slab.several_ranks", "managed slabs are refused to several ranks", _several_ranks),
    Check("slab.budget", "over budget is a typed error and leaves nothing", _over_budget),
    Check("slab.shared", "ranks share bytes, private writes stay private", _shared),
    Check("view.cpu", "CPU tensors of every cached dtype on the slab's bytes", _cpu_views),
    Check("view.cuda", "CUDA tensors of every cached dtype on the slab's bytes", _cuda_views),
)
