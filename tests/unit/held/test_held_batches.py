"""Batches from held memory are what torch.stack gives, in memory that is used again."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.held import buffers
from simpletuner_gh200.held.batch import DeviceDelivery, assemble, same_tensor, stacked
from simpletuner_gh200.held.buffers import SMALLEST, BufferPool
from simpletuner_gh200.memory.lane import Copier, Lane
from simpletuner_gh200.seams.features.caches.batch_path import BatchPath


def channels_last(*shape):
    return torch.randn(*shape[1:], shape[0]).movedim(-1, 0)


MAKERS = {
    "contiguous": lambda number: torch.randn(4, 8, 8),
    "bfloat16": lambda number: torch.randn(16, 64, 64).to(torch.bfloat16),
    "channels last": lambda number: channels_last(4, 8, 8),
    "video, channels last": lambda number: channels_last(16, 3, 8, 8),
    "one dimension": lambda number: torch.randn(7),
    # The last image of a bucket is encoded alone, and comes contiguous where the others are channels-last.
    "a remainder": lambda number: torch.randn(4, 8, 8) if number == 4 else channels_last(4, 8, 8),
    "a remainder first": lambda number: channels_last(4, 8, 8) if number else torch.randn(4, 8, 8),
}


@pytest.fixture
def copier():
    made = Copier(Lane(torch.device("cpu")))
    yield made
    made.close()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", ["host", "copied"])
def test_rows_are_what_stack_gives(cache, held, copier, make, how):
    values = [make(number) for number in range(5)]
    paths = [held(value, f"{n}.pt") for n, value in enumerate(values)]
    entries = cache.find_all(paths)
    leaves = [entry.layout.single for entry in entries]
    assert same_tensor(leaves) is not None
    delivery = partial(assemble, pool=BufferPool()) if how == "host" else DeviceDelivery(copier)
    batch = delivery(entries, leaves)
    expected = torch.stack(values)
    assert torch.equal(batch, expected)
    assert batch.stride() == expected.stride()


def batch_path(cache):
    names = SimpleNamespace(generate_vae_cache_filename=lambda path: (path, path))
    arguments = SimpleNamespace(model_family="sdxl")
    collate = SimpleNamespace(StateTracker=SimpleNamespace(get_vaecache=lambda id: names, get_args=lambda: arguments))
    return BatchPath(collate, {"x": cache}, partial(assemble, pool=BufferPool()))


def test_a_batch_that_is_left_to_simpletuner_is_counted_with_the_reason(cache, held, tmp_path):
    square, wide = held(torch.zeros(1, 2, 2), "a.pt"), held(torch.zeros(1, 2, 4), "b.pt")
    way = batch_path(cache)
    assert way.compute_latents([square, wide], "x") is None
    assert way.compute_latents([square, str(tmp_path / "not made yet.pt")], "x") is None
    assert cache.statistics.declined == {"latents of different shapes or types": 1, "an entry is not held": 1}
    assert (cache.statistics.hits, cache.statistics.misses) == (0, 1), "what SimpleTuner encodes on demand"


def test_unlike_tensors_are_not_batched(cache, held):
    paths = [held(torch.zeros(3), "a.pt"), held(torch.zeros(4), "b.pt"), held({"latents": torch.zeros(3)}, "c.pt")]
    one, other, inside = (entry.layout for entry in cache.find_all(paths))
    assert same_tensor([one.single, other.single]) is None
    assert same_tensor([one.single, inside.single]) is None
    assert same_tensor([one.single, inside.named["latents"]]) is not None


@pytest.mark.parametrize(
    ("shape", "joined"), [((1, 77, 64), True), ((77, 64), False), ((64,), False), ((3, 1, 2), True)]
)
def test_embeds_are_joined_as_torch_does(shape, joined):
    tensors = [torch.randn(shape) for _ in range(3)]
    expected = torch.cat(tensors) if joined else torch.stack(tensors)
    got = stacked(tensors, BufferPool(), joined=joined)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], torch.zeros(3).requires_grad_()],
    ids=["shape", "dtype", "strides", "grad"],
)
def test_what_is_out_of_the_ordinary_is_left_to_torch(odd):
    assert stacked([torch.zeros(3), odd], BufferPool(), joined=False) is None


def test_a_buffer_comes_back_when_the_last_tensor_on_it_is_gone():
    pool = BufferPool()
    first = torch.from_numpy(pool.get(SMALLEST))
    address = first.data_ptr()
    row = first[3:5]
    del first
    assert pool.get(SMALLEST).ctypes.data != address, "a view of the first is still out"
    del row
    gc.collect()
    assert address in {one.ctypes.data for one in [pool.get(SMALLEST) for _ in range(2)]}
    assert (pool.made, pool.reused) == (2, 2)


def test_assembled_batches_reuse_their_buffer(cache, held):
    paths = [held(torch.full((SMALLEST,), float(n)), f"{n}.pt") for n in range(4)]
    pool = BufferPool()
    for _ in range(5):
        entries = cache.find_all(paths)
        batch = assemble(entries, [entry.layout.single for entry in entries], pool)
        assert [float(row[0]) for row in batch] == [0, 1, 2, 3]
        del batch
    assert (pool.made, pool.reused) == (1, 4)


def test_a_buffer_that_dies_while_the_pool_is_busy_blocks_nobody():
    """Garbage is collected wherever Python allocates, also in ``get`` of the same thread, under its lock."""
    pool = BufferPool()
    lent = pool.get(SMALLEST)
    address = lent.ctypes.data
    with pool._lock:
        del lent
    again = pool.get(SMALLEST)
    assert again.ctypes.data == address
    assert (pool.made, pool.reused) == (1, 1)


def test_what_comes_back_while_the_pool_is_busy_is_not_kept_beyond_the_limit():
    pool = BufferPool(keep=SMALLEST)
    lent = [pool.get(SMALLEST) for _ in range(4)]
    with pool._lock:
        lent.clear()
    assert len(pool._returned) == 4
    pool.get(SMALLEST)
    assert len(pool._returned) == 0
    assert pool._idle <= SMALLEST


@pytest.mark.parametrize(("page", "asked"), [(4096, 1), (65536, 0)])
def test_huge_pages_are_asked_for_only_where_they_are_small(monkeypatch, page, asked):
    advised = []
    monkeypatch.setattr(buffers, "PAGE", page)
    monkeypatch.setattr(buffers, "advise_pages", lambda *call: advised.append(call))
    buffers._fresh(1 << 21)
    assert len(advised) == asked
