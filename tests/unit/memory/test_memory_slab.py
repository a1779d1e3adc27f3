"""Slabs: zero-copy views of any dtype, sharing, copy-on-write, and memory that lives as long as its last view."""

import gc
import os

import numpy as np
import pytest
import torch

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.slab import Slab

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_view_of_every_cached_dtype_shows_the_slabs_bytes(dtype: torch.dtype) -> None:
    slab = Slab.anonymous(4096)
    source = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    raw = source.view(torch.uint8).numpy().reshape(-1)
    slab.array[128 : 128 + raw.size] = raw
    view = slab.tensor(128, (2, 3), dtype)
    assert view.dtype == dtype
    assert view.data_ptr() == slab.address + 128
    assert torch.equal(view.view(torch.uint8), source.view(torch.uint8))


def test_size_is_exact_and_ranges_outside_are_refused() -> None:
    slab = Slab.anonymous(1001)
    assert slab.array.size == 1001
    with pytest.raises(ValueError, match="outside slab"):
        slab.bytes_at(1000, 2)
    with pytest.raises(ValueError, match="multiple"):
        slab.tensor(1, (2,), torch.float32)
    assert slab.tensor(1001 // 8 * 8, (0, 4), torch.float32).shape == (0, 4)


def test_scalar_view() -> None:
    slab = Slab.anonymous(64)
    slab.tensor(8, (), torch.int64).fill_(7)
    assert int(slab.array[8]) == 7


def test_views_outlive_a_closed_slab() -> None:
    slab = Slab.shared(8192)
    view = slab.tensor(0, (16,), torch.float32).fill_(2.0)
    descriptor = slab.fd
    assert descriptor is not None
    slab.close()
    slab.close()
    gc.collect()
    assert view.sum() == 32
    os.fstat(descriptor)
    with pytest.raises(MemoryRoomError, match="closed"):
        slab.tensor(0, (1,), torch.uint8)
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


def test_private_view_takes_writes_for_itself() -> None:
    slab = Slab.shared(3 * 4096)
    slab.array[:] = 1
    private = slab.private()
    hit = private.tensor(4096, (4096,), torch.uint8)
    hit.mul_(5)
    assert (slab.array == 1).all()
    assert (private.array[4096:8192] == 5).all()
    slab.array[8192] = 3
    assert private.array[8192] == 3, "pages that were not written still show the shared bytes"


def test_private_needs_shared_memory() -> None:
    with pytest.raises(MemoryRoomError, match=r"Slab\.shared"):
        Slab.anonymous(64).private()


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


def test_child_after_fork_has_its_own_copy() -> None:
    slab = Slab.anonymous(4096)
    slab.array[0] = 1
    pid = os.fork()
    if pid == 0:
        slab.array[0] = 2
        slab.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert slab.array[0] == 1


def test_array_keeps_memory_without_the_slab() -> None:
    view = Slab.anonymous(1 << 20).array
    gc.collect()
    view[:] = 3
    assert int(np.sum(view, dtype=np.int64)) == 3 << 20
