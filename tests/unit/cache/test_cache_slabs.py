"""Other kinds of slab: memory that can't be mapped twice is served by copies."""

from __future__ import annotations

import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.memory.slab import Slab


class Unmappable:
    """Stands in for managed memory: no descriptor, one mapping."""

    def __init__(self):
        self.made = []

    def make(self, size, *, label, shared):
        assert not shared
        self.made.append(size)
        return Slab.anonymous(size, label=label)

    def attach(self, fd, size, *, label):
        raise AssertionError("nobody else can map it")


def test_hits_from_memory_that_cannot_be_mapped_twice_are_copies(saved):
    slabs = Unmappable()
    control = Control.create(8, label="managed", shared=False)
    table = Table("managed", control, slabs=slabs, growth=1 << 20, mappable=False)
    values = [torch.full((200_000,), float(n)) for n in range(3)]
    paths = [saved(value, f"{n}.pt") for n, value in enumerate(values)]
    assert all(take_in(table, path) for path in paths)
    assert slabs.made == [1 << 20] * 3, "one segment per entry of 800 kB"
    for path, value in zip(paths, values, strict=True):
        table.get(path).fill_(-1)
        assert torch.equal(table.get(path), value)
    assert table.published_at(table.get(paths[0]).data_ptr()) is None
    table.close()
