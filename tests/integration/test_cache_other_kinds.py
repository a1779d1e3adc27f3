"""SimpleTuner's own image-embed, grounding and distillation caches, entered from the top, with our tables behind."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
pytest.importorskip("simpletuner.helpers.caching.image_embed")

from simpletuner.helpers.caching.distillation import DistillationCache
from simpletuner.helpers.caching.image_embed import ImageEmbedCache
from simpletuner.helpers.data_backend.local import LocalDataBackend
from simpletuner.helpers.training.state_tracker import StateTracker

from simpletuner_gh200.held.caches import opened
from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend, ServedGrounding
from simpletuner_gh200.seams.features.caches.found import find_caches

EVERYTHING = dict.fromkeys(("vae", "audio", "text", "image_embed", "distillation"), True)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SimpleTuner's state of a run, as far as these caches look at it; put back afterwards."""
    (tmp_path / "output").mkdir()
    monkeypatch.setattr(StateTracker, "args", SimpleNamespace(output_dir=str(tmp_path / "output")), raising=False)
    monkeypatch.setattr(StateTracker, "data_backends", {})
    monkeypatch.setattr(StateTracker, "default_text_embed_cache", None)
    return StateTracker


@contextmanager
def served(expected: str):
    """The one cache that is found, behind our tables, filled from disk; yields what we hold of it."""
    (found,) = find_caches(EVERYTHING)
    assert found.wanted.kind == expected
    with opened([found.wanted]) as caches:
        held = caches[found.wanted.name]
        reads_itself = not hasattr(found.backend, "torch_load")
        patches = (
            ServedGrounding(found.backend, held)
            if reads_itself
            else ServedBackend(found.backend, [Route(found.wanted.folder, held)])
        ).patches
        for patch in patches:
            patch.install()
        try:
            yield held
        finally:
            for patch in reversed(patches):
                patch.uninstall()


class Embedder:
    """Mean colour of each image, so that every embed tells which image it is of."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, images, captions=None):
        self.encoded += len(images)
        return torch.stack([torch.tensor(image.getpixel((0, 0)), dtype=torch.float32) for image in images])


def pictures(folder: Path, count: int) -> list[str]:
    folder.mkdir()
    paths = [str(folder / f"{number}.png") for number in range(count)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number, 100, 200)).save(path)
    return paths


def test_image_embeds(state, tmp_path: Path) -> None:
    paths = pictures(tmp_path / "images", 5)
    backend = LocalDataBackend(None, "pictures")
    embedder = Embedder()
    cache = ImageEmbedCache(
        id="pictures",
        dataset_type="image",
        model=SimpleNamespace(get_conditioning_image_embedder=lambda: embedder),
        accelerator=None,
        metadata_backend=None,
        image_data_backend=backend,
        instance_data_dir=str(tmp_path / "images"),
        cache_dir=str(tmp_path / "embeds"),
    )
    state.data_backends["pictures"] = {"conditioning_image_embed_cache": cache}
    cache.process_files(paths[:4])
    with served("image_embed") as held:
        assert [cache.retrieve_from_cache(path).tolist() for path in paths[:4]] == [[n, 100, 200] for n in range(4)]
        report = held.report()
        assert (report["hits"], report["misses"]) == (4, 0)
        # One that is missing is computed by SimpleTuner, and written by it.
        assert cache.retrieve_from_cache(paths[4]).tolist() == [4, 100, 200]
        assert embedder.encoded == 5
        # What SimpleTuner rewrites is never served old.
        cache._write_embed(paths[0], torch.tensor([9.0]))
        assert cache.retrieve_from_cache(paths[0]).tolist() == [9]
    assert cache.retrieve_from_cache(paths[4]).tolist() == [4, 100, 200], "its files are valid without us"


def test_distillation_pairs(state, tmp_path: Path) -> None:
    cache = DistillationCache("pairs", LocalDataBackend(None, "pairs"), str(tmp_path / "pairs"))
    state.data_backends["pairs"] = {"distillation_cache": cache}
    pairs = [{"noise": torch.full((4,), float(n)), "steps": [n, n + 1], "name": f"pair {n}"} for n in range(3)]
    for number, pair in enumerate(pairs):
        cache.write_tensor(f"pair_{number:05d}", pair)
    with served("distillation") as held:
        for _epoch in range(2):
            for pair in pairs:
                payload, _path = cache.load_next_pair()
                assert payload.keys() == pair.keys()
                assert torch.equal(payload["noise"], pair["noise"])
                assert (payload["steps"], payload["name"]) == (pair["steps"], pair["name"])
                payload["noise"].zero_()
        assert held.report()["hits"] == 6
        cache.write_tensor("pair_00000", {"noise": torch.full((4,), 8.0), "steps": [], "name": "new"})
        assert held.report()["entries"] == 2, "what was rewritten is withdrawn"
        assert cache.load_next_pair()[0]["name"] == "new"


@pytest.mark.skipif(
    importlib.util.find_spec("simpletuner.helpers.caching.grounding_image_embed") is None,
    reason="this release has no grounding cache",
)
def test_grounding_embeds(state, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletuner.helpers.caching import grounding_image_embed

    (kind,) = (
        value
        for value in vars(grounding_image_embed).values()
        if isinstance(value, type) and hasattr(value, "retrieve")
    )
    cache = kind.__new__(kind)  # its constructor loads a vision model
    cache.cache_dir = str(tmp_path / "grounding")
    os.makedirs(cache.cache_dir)
    monkeypatch.setattr(StateTracker, "_grounding_image_embed_caches", {"boxes": cache})
    for entity in range(2):
        torch.save(torch.full((4,), float(entity)), cache._cache_path("a.png", entity))
    with served("image_embed") as held:
        assert [float(cache.retrieve("a.png", entity)[0]) for entity in range(2)] == [0, 1]
        assert cache.retrieve("a.png", 2) is None
        assert held.report()["hits"] == 2
