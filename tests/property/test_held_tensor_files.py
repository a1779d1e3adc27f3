"""Files that are taken apart natively give what ``torch.load`` gives, or nothing; damaged ones never give a tensor."""

from __future__ import annotations

import gzip
import io
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simpletuner_gh200.held import fill as filling
from simpletuner_gh200.held import tensor_files
from simpletuner_gh200.held.cache import MISSING, HeldCache
from simpletuner_gh200.held.fill import Filler

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn),
)


@pytest.fixture(params=["native", "python"])
def way(request, monkeypatch):
    """Both ways have to pass every test: the second is that of files unlike those that torch usually writes."""
    if request.param == "python":
        monkeypatch.setattr(filling._Batches, "take", lambda self, paths: (1, self._filler.take_one(paths[0])))
    return request.param


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 5), max_size=4)
    return st.builds(_tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 3), st.integers(0, 2**31))


def _tensor(dtype: torch.dtype, shape: list[int], view: int, seed: int) -> torch.Tensor:
    """Plain, transposed, a part of a larger storage, or channels last."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*(shape or [1]), 16), dtype=torch.uint8, generator=generator)
    made = raw.view(dtype) if dtype.itemsize <= 16 else raw
    made = made.reshape(-1)[: max(int(np.prod(shape)), 0)].reshape(shape) if shape else made.reshape(-1)[0].clone()
    made = made.clone()
    if view == 1 and made.dim() >= 2:
        return made.transpose(0, 1)
    if view == 2 and made.dim() >= 1 and len(made) > 1:
        return made[1:]
    if view == 3 and made.dim() == 4:
        return made.contiguous(memory_format=torch.channels_last)
    return made


def values(more: st.SearchStrategy[object] = st.nothing()) -> st.SearchStrategy[object]:  # noqa: B008 - it holds nothing
    plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8) | st.floats(allow_nan=False)
    leaves = tensors() | plain | more
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=6), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=5,
    )


def content_of(value: object, *, gzipped: bool, protocol: int = 2, name: str | None = None) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=protocol)
    return gzip.compress(out.getvalue(), 6) if gzipped else out.getvalue()


def filled(paths: list[Path], *, allowed: int | None = None) -> HeldCache:
    cache = HeldCache.alone("t", look_for_nan=True)
    Filler(cache, allowed=allowed).fill([str(path) for path in paths], workers=2)
    return cache


def same(ours: object, theirs: object) -> bool:
    if isinstance(theirs, torch.Tensor):
        return (
            type(ours) is type(theirs)
            and (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            and ours.requires_grad == theirs.requires_grad
            and bytes_of(ours) == bytes_of(theirs)
        )
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    return ours == theirs


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@QUICK
@given(value=values(), gzipped=st.booleans(), protocol=st.sampled_from([2, 3, 4]))
def test_what_is_held_is_what_torch_loads(value, gzipped, protocol, way, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    path = folder / "x.pt"
    path.write_bytes(content_of(value, gzipped=gzipped, protocol=protocol))
    cache = filled([path])
    ours = cache.get(str(path))
    if ours is MISSING:
        assert cache.statistics.fallbacks, "left to SimpleTuner, and said why"
    else:
        content = gzip.decompress(path.read_bytes()) if gzipped else path.read_bytes()
        assert same(ours, torch.load(io.BytesIO(content), weights_only=True))
    cache.close()


def test_one_pickle_is_understood_once_for_many_files(way, tmp_path, monkeypatch):
    """Each with content of its own; the loader is asked once."""
    made = {tmp_path / f"{number}.pt": torch.randn(4, 8, 8).to(torch.bfloat16) for number in range(40)}
    for path, value in made.items():
        path.write_bytes(content_of(value, gzipped=True))
    asked = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: asked.append(1) or load(*args, **kwargs))
    cache = filled(list(made))
    assert all(same(cache.get(str(path)), value) for path, value in made.items())
    assert len(asked) == (1 if way == "native" else 40)
    assert cache.statistics.published == 40
    cache.close()


def test_files_that_are_not_as_torch_writes_them_go_the_old_way_and_are_counted(tmp_path):
    legacy, squeezed, fine = (tmp_path / name for name in ("legacy.pt", "squeezed.pt", "fine.pt"))
    value = torch.arange(64).float()
    torch.save(value, legacy, _use_new_zipfile_serialization=False)
    fine.write_bytes(content_of(value, gzipped=False))
    with zipfile.ZipFile(fine) as old, zipfile.ZipFile(squeezed, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member), zipfile.ZIP_STORED)
    squeezed.write_bytes(squeezed.read_bytes()[:-2] + b"\x02\x00hi")  # with a comment
    cache = filled([legacy, squeezed, fine])
    assert all(same(cache.get(str(path)), value) for path in (legacy, fine))
    assert cache.statistics.fallbacks[filling.NOT_READ_NATIVELY] == 2
    cache.close()


def test_a_cache_whose_every_file_has_its_own_pickle_is_held_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MOST_SHAPES", 3)
    monkeypatch.setattr(filling, "MOST_SHAPES", 3)
    made = {tmp_path / f"{number}.pt": {"prompt": f"number {number}", "x": torch.ones(3)} for number in range(12)}
    for path, value in made.items():
        path.write_bytes(content_of(value, gzipped=False))
    cache = filled(list(made))
    assert all(same(cache.get(str(path)), value) for path, value in made.items())
    cache.close()


@pytest.mark.parametrize("gzipped", [True, False])
def test_a_damaged_file_never_gives_a_tensor(gzipped, way, tmp_path):
    """One byte anywhere: it is not held, or what is held is what was saved."""
    value = {"x": torch.arange(40, dtype=torch.int16), "y": torch.ones(3)}
    whole = content_of(value, gzipped=gzipped)
    chance = random.Random(5)
    made = {}
    for number in range(120):
        content = bytearray(whole)
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
        if number % 6 == 0:
            content = content[: chance.randrange(len(content))]
        path = tmp_path / f"{number}.pt"
        path.write_bytes(content)
        made[path] = at
    good = tmp_path / "good.pt"
    good.write_bytes(whole)
    cache = filled([good, *made])
    assert same(cache.get(str(good)), value)
    wrong = [at for path, at in made.items() if (got := cache.get(str(path))) is not MISSING and not same(got, value)]
    assert not wrong
    held = cache.statistics.published - 1
    assert held < len(made) / 2, "bytes that mean nothing may differ, but most mean something"
    cache.close()


def test_a_file_that_is_larger_than_a_batch(way, tmp_path):
    big, small = tmp_path / "big.pt", tmp_path / "small.pt"
    content = torch.randn(tensor_files.BUFFER_BYTES // 2)
    big.write_bytes(content_of(content, gzipped=False))
    small.write_bytes(content_of(torch.ones(2), gzipped=True))
    squeezed = tmp_path / "zeros.pt"
    squeezed.write_bytes(content_of(torch.zeros(tensor_files.BUFFER_BYTES), gzipped=True))
    cache = filled([big, small, squeezed])
    assert same(cache.get(str(big)), content) and same(cache.get(str(small)), torch.ones(2))
    assert cache.get(str(squeezed)).numel() == tensor_files.BUFFER_BYTES
    cache.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), None])
def test_what_is_not_finite_is_seen(dtype, odd, way, tmp_path):
    """At any place, also in a part that fills no whole word."""
    paths = [tmp_path / f"{count}.pt" for count in (1, 3, 7, 1001)]
    for path, count in zip(paths, (1, 3, 7, 1001), strict=True):
        value = torch.full((count,), 3.0).to(dtype)
        if odd is not None:
            value[-1] = odd
        path.write_bytes(content_of(value, gzipped=False))
    cache = filled(paths)
    assert [cache.find(str(path)).finite for path in paths] == [odd is None] * 4
    cache.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_seen_wherever_it_is(dtype, way, tmp_path):
    """Checksum and look go over the bytes together, some hundreds at a time, and what is left over by itself."""
    count = 700
    places = [0, 1, 31, 32, 127, 128, 129, 255, 256, 511, 640, 641, 698, 699]
    paths = [tmp_path / f"{place}.pt" for place in places]
    for path, place in zip(paths, places, strict=True):
        value = torch.linspace(-1e30, 1e30, count).to(dtype)
        value[place] = float("nan")
        path.write_bytes(content_of({"latents": value, "part": torch.arange(9)[2:5]}, gzipped=place % 2 == 0))
    whole = tmp_path / "whole.pt"
    whole.write_bytes(content_of({"latents": torch.linspace(-1e30, 1e30, count).to(dtype)}, gzipped=False))
    cache = filled([*paths, whole])
    assert [cache.find(str(path)).finite for path in paths] == [False] * len(paths)
    assert cache.find(str(whole)).finite
    cache.close()
