"""Filling: what can be held is, within its budget, in segments that appear when they are whole; nothing else is run."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.held import fill as filling
from simpletuner_gh200.held.cache import MISSING
from simpletuner_gh200.held.fill import Filler
from tests.unit.held.conftest import filled


def many(saved, count, size=1000):
    return [saved(torch.full((size,), float(number)), f"{number:03}.pt") for number in range(count)]


@pytest.mark.parametrize("workers", [1, 4])
def test_everything_is_held_and_each_is_what_it_was(saved, workers):
    paths = many(saved, 60)
    cache = filled()
    Filler(cache).fill(paths, workers=workers)
    assert all(float(cache.get(path)[0]) == number for number, path in enumerate(paths))
    assert cache.statistics.published == len(paths) == cache.report()["entries"]
    assert all(cache.find(path).finite for path in paths)


def test_segments_appear_one_by_one_while_filling_goes_on(saved, monkeypatch):
    monkeypatch.setattr(filling, "SMALLEST", 20_000)
    monkeypatch.setattr(filling, "MOST_FILES", 4)
    paths, cache = many(saved, 40), filled()
    seen: list[int] = []
    Filler(cache).fill(
        paths, pace=SimpleNamespace(begin=int, ended=False, rest=lambda _: seen.append(len(cache.shelf)))
    )
    assert 0 < seen[len(seen) // 2] < len(paths) == len(cache.shelf)
    assert len(cache.shelf.segments) > 3


def test_what_is_held_is_not_taken_in_again(saved):
    paths = many(saved, 5)
    cache = filled(*paths)
    Filler(cache).fill(paths)
    assert cache.statistics.published == 5


@pytest.mark.parametrize("budget", range(3500, 20_000, 1777))
def test_the_budget_holds_to_the_byte_and_is_reported_once(saved, caplog, budget):
    cache = filled(*many(saved, 8), allowed=budget)
    assert cache.held_bytes <= budget
    lost = 8 - len(cache.shelf)
    assert lost and cache.statistics.fallbacks == {"over budget": lost}
    assert len([record for record in caplog.records if "further entries are read from disk" in record.message]) == 1


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/gh200-evil",)


def test_files_are_never_unpickled_freely(tmp_path):
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    assert not filled(str(tmp_path / "evil.pt")).shelf
    assert not os.path.exists("/tmp/gh200-evil")


class Refusing:
    """Of memory: the device takes no more of it."""

    choice = SimpleNamespace(kind="registered")

    def prepare(self, fd, size):
        os.ftruncate(fd, size)

    def attach(self, fd, size, *, label):
        raise FeatureUnavailable("no more can be registered", remedy="none")


@pytest.mark.parametrize("refusal", ["registering", "making", "writing"])
def test_memory_that_is_refused_leaves_the_files_to_simpletuner(saved, monkeypatch, refusal):
    def full(*_):
        raise OSError(28, "no space left")

    if refusal != "registering":
        monkeypatch.setattr(filling, "create_memfd" if refusal == "making" else "SegmentWriter", full)
    paths = many(saved, 4)
    cache = filled(*paths, maker=Refusing() if refusal == "registering" else None)
    assert cache.get(paths[0]) is MISSING
    ((reason, count),) = cache.statistics.fallbacks.items()
    assert reason.startswith("no memory: ") and count == 4
