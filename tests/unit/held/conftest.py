from __future__ import annotations

import pytest
import torch

from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.pack_place import PackPlace
from simpletuner_gh200.held.packs import PackFolder


def filled(*paths, packs=(), **options):
    """A cache of this process with these files in it."""
    cache = HeldCache.alone("test", *packs, look_for_nan=True)
    Filler(cache, **options).fill(paths)
    return cache


def packed_at(folder, *paths, source="src", made_by=""):
    """A folder of packs with these files in them."""
    packs = PackFolder(folder, made_by)
    PackPlace.make(folder, str(source))
    assert packs.save(filled(*paths)) > 0
    return packs


@pytest.fixture
def cache():
    made = HeldCache.alone("test", look_for_nan=True)
    yield made
    made.close()


@pytest.fixture
def saved(tmp_path):
    """Write a value as SimpleTuner would; returns the path as text."""

    def save(value, name="entry.pt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        return str(path)

    return save


@pytest.fixture
def held(cache, saved):
    """Write a value and take it in."""

    def hold(value, name="entry.pt"):
        path = saved(value, name)
        Filler(cache).fill([path])
        assert cache.find(path) is not None, cache.statistics.fallbacks
        return path

    return hold


@pytest.fixture(params=["native", "python"])
def file_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same outcome is asked of the C code and of what is done where there is no compiler."""
    from simpletuner_gh200.held import bulk, listing, stager

    if request.param == "native":
        assert bulk.library_if_any() is not None, "a C compiler is needed to test the C code"
    else:
        for module in (stager, listing):
            monkeypatch.setattr(module, "library_if_any", lambda: None)
    return str(request.param)
