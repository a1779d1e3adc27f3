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
