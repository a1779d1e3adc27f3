"""Held caches behind a backend: reads served, writes and deletions known at once, files as the backend makes them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.held.cache import MISSING, HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend, ServedGrounding
from tests.unit.bounded import bounded


class Backend:
    """The part of a local backend that caches use: loads, saves and deletes, and remembers that it was asked."""

    def __init__(self):
        self.loads = 0

    def torch_load(self, filename):
        self.loads += 1
        return torch.load(filename)

    def torch_save(self, data, original_location):
        torch.save(data, original_location)

    def write(self, filepath, data):
        with open(filepath, "wb") as file:
            self.torch_save(data, file)

    def delete(self, filepath):
        os.remove(filepath)


@pytest.fixture
def cache():
    """One that takes in at once what it is asked for, where a run does so behind itself."""
    made = HeldCache.alone("test", look_for_nan=True)
    made.wish = lambda path: Filler(made).fill([path])
    yield made
    made.close()


@pytest.fixture
def served(tmp_path, cache):
    backend = Backend()
    (tmp_path / "cache").mkdir()
    made = ServedBackend(backend, [Route(str(tmp_path / "cache"), cache)])
    for patch in made.patches:
        patch.install()
    yield backend
    for patch in made.patches:
        patch.uninstall()
    assert "torch_load" not in vars(backend)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "cache" / "a.pt")


def test_what_is_written_is_held_and_read_without_the_file(served, cache, path):
    served.torch_save({"x": torch.ones(3)}, path)
    assert torch.equal(served.torch_load(path)["x"], torch.ones(3))
    assert served.loads == 0
    assert torch.equal(torch.load(path)["x"], torch.ones(3)), "and the file is the backend's own"


@bounded
def test_a_fifo_is_refused_instead_of_waited_for(served, path):
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"not a regular file.*remove it"):
        served.torch_load(path)
    assert served.loads == 0


def test_a_missing_file_is_the_backends_to_report(served, path):
    with pytest.raises(FileNotFoundError):
        served.torch_load(path)


def test_write_through_a_file_object_is_known_too(served, cache, path):
    served.write(path, torch.ones(2))
    assert torch.equal(served.torch_load(path), torch.ones(2))
    served.write(path, torch.zeros(2))
    assert torch.equal(served.torch_load(path), torch.zeros(2))
    assert torch.equal(served.torch_load(Path(path)), torch.zeros(2))
    assert served.loads == 0


def test_deleting_withdraws(served, cache, path):
    served.torch_save(torch.ones(2), path)
    served.delete(path)
    assert cache.get(path) is MISSING
    with pytest.raises(FileNotFoundError):
        served.torch_load(path)


def test_a_failed_write_leaves_no_entry(served, cache, path):
    served.torch_save(torch.ones(2), path)
    with pytest.raises(AttributeError):
        served.torch_save(lambda: None, path)
    assert cache.get(path) is MISSING


def test_what_we_cannot_hold_is_loaded_by_the_backend_every_time(served, cache, path):
    wide = torch.zeros(4, 4)[:, :2]
    served.torch_save(wide, path)
    for turn in range(1, 3):
        assert served.torch_load(path).stride() == wide.stride()
        assert served.loads == turn
    assert cache.statistics.fallbacks["strides with gaps or overlap"] == 3


def test_other_files_are_not_our_business(served, cache, tmp_path):
    served.torch_save(torch.ones(1), str(tmp_path / "elsewhere.pt"))
    served.torch_load(str(tmp_path / "elsewhere.pt"))
    served.torch_save(torch.ones(1), io.BytesIO())
    served.write(str(tmp_path / "cache" / "metadata.json"), torch.ones(1))
    assert cache.report()["entries"] == 0
    assert cache.statistics.misses == 0


def test_what_is_not_held_yet_is_loaded_by_the_backend_and_wished_for(served, cache, path):
    wishes = []
    cache.wish = wishes.append
    served.torch_save(torch.ones(2), path)
    assert torch.equal(served.torch_load(path), torch.ones(2))
    assert (served.loads, wishes) == (1, [path, path])


def test_the_longest_folder_wins(tmp_path, cache):
    inner = HeldCache.alone("inner")
    made = ServedBackend(Backend(), [Route("/c", cache), Route("/c/inner", inner)])
    assert made.cache_of("/c/inner/a.pt") is inner
    assert made.cache_of("/c/a.pt") is cache
    assert made.cache_of("/cc/a.pt") is None


class Grounding:
    def __init__(self, folder):
        self.folder = folder
        self.loads = 0

    def _cache_path(self, image_path, entity_idx):
        return os.path.join(self.folder, f"{image_path}__bbox_{entity_idx}.pt")

    def retrieve(self, image_path, entity_idx):
        self.loads += 1
        path = self._cache_path(image_path, entity_idx)
        return torch.load(path) if os.path.exists(path) else None


def test_grounding_embeds_are_served_too(tmp_path, cache):
    grounding = Grounding(str(tmp_path))
    for patch in ServedGrounding(grounding, cache).patches:
        patch.install()
    assert grounding.retrieve("x", 0) is None
    torch.save(torch.ones(4), tmp_path / "x__bbox_0.pt")
    assert torch.equal(grounding.retrieve("x", 0), torch.ones(4))
    assert torch.equal(grounding.retrieve("x", entity_idx=0), torch.ones(4))
    assert grounding.loads == 2
