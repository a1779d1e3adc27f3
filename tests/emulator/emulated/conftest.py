"""One emulated driver per process, put back to a healthy GH200 before each test."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from simpletuner_gh200.memory import advice
from simpletuner_gh200.memory.driver.cuda import CudaDriver
from tests.emulator.emulation import PERSONALITIES, Emulator

HBM = 64 << 20


@pytest.fixture(scope="session")
def _emulator() -> Emulator:
    return Emulator()


@pytest.fixture
def emulator(_emulator: Emulator) -> Iterator[Emulator]:
    _emulator.heal()
    _emulator.become("gh200")
    _emulator.set_hbm(HBM)
    before = _emulator.held()
    yield _emulator
    _emulator.heal()
    assert _emulator.held() == before, "the test left something of the driver's behind"


@pytest.fixture(params=PERSONALITIES)
def personality(request: pytest.FixtureRequest, emulator: Emulator) -> str:
    name: str = request.param
    emulator.become(name)
    return name


@pytest.fixture
def driver(emulator: Emulator) -> CudaDriver:
    return CudaDriver()


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    """Tests of lifetimes collect garbage; without this each time through all of torch."""
    gc.freeze()


@pytest.fixture
def kernel(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has system memory where the emulated driver moved it, HBM being node 1."""

    def nodes(address: int, size: int, page: int) -> Counter[int]:
        return Counter(1 if emulator.residency(at) >= 0 else 0 for at in range(address, address + size, page))

    monkeypatch.setattr(advice, "nodes_of_pages", nodes)
