"""Tensors on an address through DLPack: same bytes, right dtype, and the memory lives exactly as long as they do."""

import gc
import weakref

import pytest
import torch

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory import dlpack
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.views import cuda_view


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str
)
def test_tensor_shows_and_writes_the_bytes_at_the_address(dtype: torch.dtype) -> None:
    slab = Slab.anonymous(4096)
    made = dlpack.tensor_at(slab.region, slab.address + 64, (3, 5), dtype, "cpu")
    made.view(torch.uint8).fill_(1)
    assert made.shape == (3, 5)
    assert slab.array[64 : 64 + 15 * dtype.itemsize].all()
    assert not slab.array[:64].any()


def test_owner_lives_as_long_as_the_last_view() -> None:
    slab = Slab.anonymous(4096)
    held = weakref.ref(slab.region)
    tensor = dlpack.tensor_at(slab.region, slab.address, (8,), torch.float32, "cpu")
    part = tensor[2:4]
    before = len(dlpack._alive)
    slab.close()
    del slab, tensor
    gc.collect()
    assert held() is not None
    part.fill_(4.0)
    del part
    gc.collect()
    assert held() is None
    assert len(dlpack._alive) == before - 1


def test_empty_tensor_needs_no_memory() -> None:
    assert dlpack.tensor_at(object(), 0, (0, 3), torch.float32, "cpu").shape == (0, 3)


def test_cuda_view_without_cuda_is_refused_with_the_reason() -> None:
    slab = Slab.anonymous(64)
    with pytest.raises(FeatureUnavailable, match="no CUDA device"):
        cuda_view(slab, 0, (4,), torch.float32, NullDriver().capabilities(0))
