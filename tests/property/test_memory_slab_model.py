"""Slabs against a model: whatever is made, viewed, written and closed, bytes and lifetimes are as a dict says."""

import weakref

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.mapping import Region
from simpletuner_gh200.memory.slab import Slab


class SlabMachine(RuleBasedStateMachine):
    slabs = Bundle("slabs")

    def __init__(self) -> None:
        super().__init__()
        self.maker = SlabMaker(NullDriver("a test"))
        self.regions: dict[int, weakref.ref[Region]] = {}
        self.model: dict[int, bytearray] = {}
        self.held: dict[int, Slab] = {}
        self.views: dict[int, np.ndarray] = {}
        self.next = 0

    @rule(target=slabs, size=st.integers(1, 15_000), shared=st.booleans())
    def make(self, size: int, shared: bool) -> int:
        self.next += 1
        self.held[self.next] = self.maker.make(size, label="x", shared=shared)
        self.model[self.next] = bytearray(size)
        self.regions[self.next] = weakref.ref(self.held[self.next].region)
        return self.next

    @rule(key=slabs, where=st.floats(0, 1), data=st.binary(min_size=1, max_size=64))
    def write(self, key: int, where: float, data: bytes) -> None:
        slab = self.held.get(key)
        if slab is None:
            return
        offset = int(where * (slab.size - 1))
        data = data[: slab.size - offset]
        slab.bytes_at(offset, len(data))[:] = np.frombuffer(data, np.uint8)
        self.model[key][offset : offset + len(data)] = data

    @rule(key=slabs)
    def view(self, key: int) -> None:
        if key in self.held:
            self.views[key] = self.held[key].bytes_at(0, self.held[key].size)

    @rule(key=consumes(slabs))
    def close(self, key: int) -> None:
        slab = self.held.pop(key, None)
        if slab is None:
            return
        slab.close()
        with pytest.raises(MemoryRoomError):
            slab.bytes_at(0, 1)
        if key not in self.views:
            del self.model[key]

    @rule()
    def drop_views(self) -> None:
        for key in list(self.views):
            del self.views[key]
            if key not in self.held:
                del self.model[key]

    @invariant()
    def bytes_are_the_models(self) -> None:
        for key, content in self.model.items():
            seen = self.held[key].array if key in self.held else self.views[key]
            assert bytes(seen) == bytes(content)

    @invariant()
    def memory_lives_as_long_as_the_models(self) -> None:
        assert {key for key, region in self.regions.items() if region() is not None} == set(self.model)

    def teardown(self) -> None:
        self.held.clear()
        self.views.clear()
        assert all(region() is None for region in self.regions.values())


SlabMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestSlabs = SlabMachine.TestCase
