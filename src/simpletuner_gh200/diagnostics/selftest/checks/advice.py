"""Every kind of advice is given, read back, and taken away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simpletuner_gh200.diagnostics.selftest.check import Bench, SelfCheck, expect
from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.driver.interface import HOST, Advice, RangeState, Span, device
from simpletuner_gh200.memory.mapping import PAGE, map_anonymous
from simpletuner_gh200.units import MIB


@contextmanager
def _managed(bench: Bench, size: int = 2 * MIB) -> Iterator[Span]:
    bench.need_device()
    bench.need(bench.caps.concurrent_managed, "the device takes no advice: no concurrent managed access")
    address = bench.driver.alloc_managed(size, bench.ordinal)
    try:
        yield address, size
    finally:
        bench.driver.free(address, bench.ordinal)


def _read_mostly(bench: Bench) -> str:
    return _toggle(bench, Advice.SET_READ_MOSTLY, Advice.UNSET_READ_MOSTLY, lambda state: state.read_mostly)


def _accessed_by(bench: Bench) -> str:
    here = device(bench.ordinal)
    return _toggle(bench, Advice.SET_ACCESSED_BY, Advice.UNSET_ACCESSED_BY, lambda state: here in state.accessed_by)


def _preferred_device(bench: Bench) -> str:
    here = device(bench.ordinal)
    on, off = Advice.SET_PREFERRED_LOCATION, Advice.UNSET_PREFERRED_LOCATION
    return _toggle(bench, on, off, lambda state: state.preferred == here)


def _toggle(bench: Bench, on: Advice, off: Advice, seen: Callable[[RangeState], bool]) -> str:
    with _managed(bench) as span:
        driver, here = bench.driver, device(bench.ordinal)
        expect(not seen(driver.range_state(span)), "in force before it was given")
        driver.advise(span, on, here)
        expect(seen(driver.range_state(span)), "accepted, but not read back")
        driver.advise(span, off, here)
        expect(not seen(driver.range_state(span)), "taken away, but still read back")
    return "given, read back, taken away"


def _preferred_host(bench: Bench) -> str:
    with _managed(bench) as span:
        outcome = advice.prefer(bench.driver, bench.caps, span, "cpu")
        expect(bool(outcome), outcome.reason)
    return outcome.reason


def _prefetch(bench: Bench) -> str:
    with _managed(bench) as span:
        stream = bench.driver.create_stream(bench.ordinal)
        try:
            there = advice.prefetch(bench.driver, bench.caps, span, device(bench.ordinal), stream)
            expect(bool(there), there.reason)
            back = advice.prefetch(bench.driver, bench.caps, span, HOST, stream)
            bench.driver.synchronize_stream(stream, bench.ordinal)
            expect(bool(back), back.reason)
        finally:
            bench.driver.destroy_stream(stream, bench.ordinal)
    return "to the device and back, as the driver's record says"


def _batched_prefetch(bench: Bench) -> str:
    with _managed(bench) as (address, size):
        half = size // 2
        spans = [(address, half - PAGE), (address + half, half)]
        stream = bench.driver.create_stream(bench.ordinal)
        try:
            bench.driver.prefetch(spans, device(bench.ordinal), stream)
            bench.driver.synchronize_stream(stream, bench.ordinal)
        finally:
            bench.driver.destroy_stream(stream, bench.ordinal)
        for span in spans:
            seen = bench.driver.range_state(span).last_prefetch
            expect(seen == device(bench.ordinal), f"one of the ranges reports {seen}")
    return "two ranges in one request"


def _whole_pages(bench: Bench) -> str:
    with _managed(bench) as (address, _size):
        outcome = advice.prefer(bench.driver, bench.caps, (address + 1, 2 * PAGE), "gpu")
        expect(outcome.size == PAGE, f"{outcome.size} bytes advised, {PAGE} lie inside")
        expect(bench.driver.range_state((address, PAGE)).preferred is None, "the page before was advised along")
        tiny = advice.prefer(bench.driver, bench.caps, (address + 1, 8), "gpu")
        expect(not tiny, "less than a page was advised")
    return "neighbours are left alone"


def _system_memory(bench: Bench) -> str:
    bench.need_device()
    region = map_anonymous(MIB)
    region.array()[:] = 1
    outcome = advice.prefetch(bench.driver, bench.caps, (region.address, MIB), device(bench.ordinal), 0)
    # An emulated device moves no real pages, and the kernel, asked, says so: the outcome must not claim otherwise.
    movable = bench.caps.mode == "numa" and bench.caps.advises_system_memory and not bench.emulated
    expect(bool(outcome) == movable, outcome.reason)
    return outcome.reason


def _device_memory(bench: Bench) -> str:
    bench.need_device()
    address = bench.driver.alloc_device(MIB, bench.ordinal)
    try:
        outcome = advice.prefer(bench.driver, bench.caps, (address, MIB), "cpu")
    finally:
        bench.driver.free(address, bench.ordinal)
    expect(not outcome and "caching allocator" in outcome.reason, outcome.reason)
    return "refused, and explained"


CHECKS = (
    SelfCheck("advice.read_mostly", "read-mostly reads back", _read_mostly),
    SelfCheck("advice.accessed_by", "accessed-by reads back", _accessed_by),
    SelfCheck("advice.preferred_device", "preferred location: device reads back", _preferred_device),
    SelfCheck("advice.preferred_host", "preferred location: host, mapped for the device, reads back", _preferred_host),
    SelfCheck("advice.prefetch", "prefetch reads back in both directions", _prefetch),
    SelfCheck("advice.prefetch_batch", "several ranges are prefetched at once", _batched_prefetch),
    SelfCheck("advice.whole_pages", "only whole pages inside the range are advised", _whole_pages),
    SelfCheck("advice.system_memory", "system memory follows the machine's mode", _system_memory),
    SelfCheck("advice.device_memory", "memory of the caching allocator is refused with the reason", _device_memory),
)
