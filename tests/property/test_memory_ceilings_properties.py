"""On any machine: nobody is allowed more than there is, a limit never gives more than none, more memory never less."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.memory.ceilings import (
    LOW_AT_LEAST,
    caches_allowance,
    dataset_allowance,
    divide,
    low_mark,
)
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB

sizes = st.integers(0, 1 << 42)
limits = st.none() | st.floats(0.001, 4096)
NOTHING = NullDriver().capabilities(0)


@st.composite
def hosts(draw: st.DrawFn) -> HostMemory:
    total = draw(st.integers(1, 1 << 42))
    available = draw(st.integers(0, total))
    return HostMemory(total=total, free=available, available=available, limit="MemAvailable")


@given(hosts(), limits)
def test_a_dataset_never_gets_the_last_page(host: HostMemory, limit: float | None) -> None:
    allowed = dataset_allowance(limit, host)
    assert 0 <= allowed.size <= max(host.available - int(host.total * 0.02), 0)
    assert allowed.size <= dataset_allowance(None, host).size, "a limit never gives more than no limit"
    assert limit is None or allowed.size <= int(limit * GIB)
    assert allowed.why


@given(hosts(), st.integers(0, 1 << 40), limits)
def test_more_memory_never_means_a_lower_ceiling(host: HostMemory, more: int, limit: float | None) -> None:
    larger = replace(host, available=host.available + more)
    assert dataset_allowance(limit, larger).size >= dataset_allowance(limit, host).size
    for one_pool in (False, True):
        fewer, more_of_it = (caches_allowance(None, machine, single_pool=one_pool) for machine in (host, larger))
        assert fewer <= more_of_it


@given(hosts(), st.integers(0, 1 << 42))
def test_in_one_pool_the_gpu_keeps_its_half(host: HostMemory, wanted: int) -> None:
    staged = min(wanted, dataset_allowance(None, host, single_pool=True).size)
    rest = replace(host, available=host.available - staged)
    cached = caches_allowance(None, rest, single_pool=True)
    assert 0 <= cached <= rest.available * 0.8
    assert staged + cached <= max(0, host.available - host.total // 2)


@given(st.integers(1, 1 << 42))
def test_the_low_mark_grows_with_the_machine(total: int) -> None:
    assert LOW_AT_LEAST <= low_mark(total) <= low_mark(2 * total) <= 8 * GIB


@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 50), st.integers(0, 10_000))), st.integers(0, 30_000)
)
def test_shares_stay_within_the_whole(needs: dict[str, tuple[int, int]], allowed: int) -> None:
    shares = divide(needs, allowed)
    assert shares.keys() == needs.keys()
    assert sum(shares.values()) <= allowed
    if sum(size for _, size in needs.values()) <= allowed:
        assert all(shares[name] >= size for name, (_, size) in needs.items()), "what fits whole is whole"
