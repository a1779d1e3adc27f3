"""Slabs: zero-copy views, sharing, copy-on-write, and memory that lives as long as its last view."""

import gc
import os

import pytest
import torch

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.slab import Slab


def tensor(slab: Slab, offset: int, size: int) -> torch.Tensor:
    return torch.from_numpy(slab.bytes_at(offset, size))


def test_size_is_exact_and_ranges_outside_are_refused() -> None:
    slab = Slab.anonymous(1001)
    assert slab.array.size == 1001
    with pytest.raises(ValueError, match="outside slab"):
        slab.bytes_at(1000, 2)
    with pytest.raises(ValueError, match="outside slab"):
        slab.bytes_at(-1, 1)
    assert slab.bytes_at(1001, 0).size == 0


def test_views_outlive_a_closed_slab() -> None:
    slab = Slab.shared(8192)
    view = tensor(slab, 0, 16).fill_(2)
    descriptor = slab.fd
    assert descriptor is not None
    slab.close()
    slab.close()
    gc.collect()
    assert view.sum() == 32
    os.fstat(descriptor)
    with pytest.raises(MemoryRoomError, match="closed"):
        slab.bytes_at(0, 1)
    del view
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_attached_slab_is_the_same_memory() -> None:
    slab = Slab.shared(4096, label="embeds")
    assert slab.fd is not None
    other = Slab.attach(slab.fd, 4096)
    other.array[5] = 9
    assert slab.array[5] == 9
    assert other.fd != slab.fd


def test_attach_refuses_more_than_there_is() -> None:
    slab = Slab.shared(4096)
    assert slab.fd is not None
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryRoomError, match="4096 bytes, 8192"):
        Slab.attach(slab.fd, 8192)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_can_shrink_it_under_readers() -> None:
    slab = Slab.shared(8192)
    assert slab.fd is not None
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(slab.fd, 10)
