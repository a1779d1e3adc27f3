"""An exception of ours inside collate leads back to upstream's own way: its prefetching thread would end silently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.held.cache import Statistics
from simpletuner_gh200.seams.features.caches import backends as fallback
from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend
from simpletuner_gh200.seams.features.caches.batch_path import BatchPath


def failing(*_args, **_named):
    raise MemoryRoomError("copies to the device have ended")


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.setattr(fallback, "_reported", set())


FAILED = {"failed: MemoryRoomError": 1}


@pytest.fixture
def cache():
    return SimpleNamespace(find_all=failing, get=failing, wish=lambda path: None, statistics=Statistics())


@pytest.fixture
def path(cache) -> BatchPath:
    tracker = SimpleNamespace(get_args=failing, get_accelerator=lambda: SimpleNamespace(device="cpu"))
    collate = SimpleNamespace(StateTracker=tracker)
    return BatchPath(collate, {"images": cache}, None)


def test_latents_are_left_to_upstream_and_it_is_said_once_and_counted(path, cache, caplog):
    assert path.compute_latents(["a.png"], "images") is None
    assert path.compute_latents(["b.png"], "images") is None
    assert caplog.text.count("SimpleTuner does it itself") == 1
    assert "copies to the device have ended" in caplog.text
    assert cache.statistics.declined == {"failed: MemoryRoomError": 2}


def test_what_was_never_ours_is_not_counted(path, cache):
    assert path.compute_latents(["a.png"], "other images") is None
    assert path.compute_latents([], "images") is None
    assert cache.statistics.declined == {}


def test_stacking_is_left_to_upstream(path, cache, monkeypatch):
    monkeypatch.setattr(path, "stack_of", failing)
    assert path.check_latent_shapes(lambda latents: ["upstream", len(latents)], [torch.zeros(1)]) == ["upstream", 1]
    assert cache.statistics.declined == FAILED


def test_what_upstream_itself_refuses_is_still_refused(path):
    def refusing(_latents):
        raise ValueError("two aspect ratios in a batch")

    with pytest.raises(ValueError, match="two aspect ratios"):
        path.check_latent_shapes(refusing, [torch.zeros(1)])


def test_embeds_are_left_to_upstream(path, monkeypatch, caplog):
    monkeypatch.setattr("simpletuner_gh200.seams.features.caches.batch_path.join_embeds", failing)
    model = SimpleNamespace(collate_prompt_embeds=lambda outputs: {})
    assert path.collating(model).collate_prompt_embeds([{"prompt_embeds": torch.zeros(1, 2)}]) == {}
    assert caplog.text.count("SimpleTuner does it itself") == 1


def test_an_entry_that_fails_is_read_from_its_file(tmp_path, cache):
    file = tmp_path / "entry.pt"
    torch.save(torch.ones(3), file)
    backend = SimpleNamespace(
        torch_load=lambda filename: torch.load(filename), torch_save=None, write=None, delete=None
    )
    served = ServedBackend(backend, [Route(str(tmp_path), cache)])
    loaded = served._load(backend.torch_load, backend, (str(file),), {})
    assert torch.equal(loaded, torch.ones(3))
    assert (cache.statistics.misses, cache.statistics.fallbacks) == (1, FAILED)
