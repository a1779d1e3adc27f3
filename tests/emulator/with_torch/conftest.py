"""Stock CUDA torch over the emulated runtime, as a GH200."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Driver
from tests.emulator.emulation import Emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    torch.cuda.init()
    return Emulator()


@pytest.fixture
def driver(emulator: Emulator) -> Iterator[Driver]:
    emulator.heal()
    emulator.become("gh200")
    yield detect.current()
    emulator.heal()
    gc.collect()


def idle_in_pools() -> int:
    """Bytes that torch counts as cached, and that are pools': those of every test stay for ever."""
    segments = (one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0))
    return sum(one["total_size"] - one["allocated_size"] for one in segments)
