"""The feature's side of the seams: what upstream gets to see, and what is staged for whom."""

from __future__ import annotations

import gc
import json
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.config.environment import node_count
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, DatasetCorrupt, DatasetTooLarge, FeatureUnavailable
from simpletuner_gh200.held.listing import list_files
from simpletuner_gh200.seams.features.store import node
from simpletuner_gh200.seams.features.store.feature import StoreFeature, write_problems
from tests.unit.held.held_samples import fill, image


class Backend(SimpleNamespace):
    def __init__(self, accelerator: Any, id: str, dataset: Any, compress_cache: bool) -> None:
        super().__init__(accelerator=accelerator, id=id, staged=dataset, compress_cache=compress_cache)


@pytest.fixture
def feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFeature]:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.backend_class", lambda: Backend)
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.waits_for_first_step", lambda _cores: False)
    made = StoreFeature()
    made.runtime = SimpleNamespace(  # type: ignore[assignment]
        settings=resolve({}, {}),
        trainer=SimpleNamespace(config=SimpleNamespace(output_dir=str(tmp_path / "out"))),
        seams={"metadata.split_buckets": SimpleNamespace(ok=True)},
    )
    made.start(None)
    yield made
    made.close()


def entry(folder: Path, name: str = "a", **more: Any) -> dict[str, Any]:
    """A dataset entry; ``in_memory`` among ``more`` is its block."""
    return {"id": name, "type": "in_memory", "instance_data_dir": str(folder), **more}


def create(feature: StoreFeature, name: str) -> Any:
    builder = SimpleNamespace(accelerator=None, _get_compression_setting=lambda _config: True)
    return feature.create_backend(builder, SimpleNamespace(id=name))


def arrive(feature: StoreFeature) -> None:
    """What comes in the background is there."""
    feature.data_ready(None)
    assert feature._job is not None
    assert feature._job.wait(30)


def test_off_unless_a_dataset_asks(feature: StoreFeature) -> None:
    assert feature.request(resolve({}, {}), {}) == "off"
    assert feature.request(replace(resolve({}, {}), in_memory_datasets=("a",)), {}) == "requested"


@pytest.mark.parametrize("kind", ["image", "video", "audio", "conditioning", "caption", "eval"])
def test_upstream_sees_a_local_dataset(feature: StoreFeature, tmp_path: Path, kind: str) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    given = entry(tmp_path / "data", dataset_type=kind, crop=True)
    seen = feature.dataset_entries([{**given, "in_memory": {"compression": "lz4"}}, {"id": "b", "type": "local"}])
    assert seen == [{**given, "type": "local"}, {"id": "b", "type": "local"}]
    backend = create(feature, "a")
    arrive(feature)
    assert backend.staged.view(tmp_path / "data/a.png") == image()
    assert backend.compress_cache is True
    assert create(feature, "a").staged is backend.staged, "staged once, whoever asks again"
    assert create(feature, "b") is None


def test_entries_over_one_folder_hold_it_once(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    folder = tmp_path / "data"
    packed = entry(folder, "packed", in_memory={"compression": "lz4"})
    feature.dataset_entries([entry(folder, "512", resolution=512), entry(folder, "1024", resolution=1024), packed])
    first, second, packed = (create(feature, name) for name in ("512", "1024", "packed"))
    assert second.staged is first.staged
    assert packed.staged is not first.staged


@pytest.mark.parametrize("kind", ["text_embeds", "image_embeds", "distillation_cache"])
def test_caches_are_staged_from_their_folder_if_it_is_there(feature: StoreFeature, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    given = {"id": "c", "type": "in_memory", "dataset_type": kind, "cache_dir": str(cache)}
    feature.dataset_entries([given])
    backend = create(feature, "c")
    fill(cache, {"x.pt": b"tensor"})
    assert backend.staged.view(cache / "x.pt") is None, "it was not there when the node looked"
    feature.start(None)
    feature.dataset_entries([given])
    assert create(feature, "c").staged.view(cache / "x.pt") == b"tensor"


def test_the_unified_cache_wins_over_in_memory_text_embeds(feature: StoreFeature, tmp_path: Path, caplog) -> None:
    feature.runtime.settings = SimpleNamespace(part=lambda _model: SimpleNamespace(text_cache_type="unified_memory"))
    with caplog.at_level(logging.INFO, "simpletuner_gh200"):
        (seen,) = feature.dataset_entries(
            [{"id": "t", "type": "in_memory", "dataset_type": "text_embeds", "cache_dir": str(tmp_path)}]
        )
    assert seen["type"] == "local"
    assert create(feature, "t") is None
    assert "text_cache_type is unified_memory, which serves it" in caplog.text


def test_disabled_entries_are_not_staged(feature: StoreFeature, tmp_path: Path) -> None:
    (seen,) = feature.dataset_entries([entry(tmp_path, "d", disabled=True)])
    assert seen["type"] == "local"
    assert create(feature, "d") is None


def test_a_wrong_key_names_the_nearest(feature: StoreFeature, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset 'a'.in_memory.compresion.*did you mean 'compression'"):
        feature.dataset_entries([entry(tmp_path, in_memory={"compresion": "lz4"})])


def test_broken_files_are_listed_beside_the_output(feature: StoreFeature, tmp_path: Path, caplog) -> None:
    fill(tmp_path / "data", {"a.png": image(), "bad.png": b"x"})
    block = {"max_corruption_rate": 0.9, "wait": True}
    feature.dataset_entries([entry(tmp_path / "data", "my/set", in_memory=block)])
    create(feature, "my/set")
    assert "bad.png" in (tmp_path / "out/gh200/staging-my_set.json").read_text()
    assert "1 image does not open" in caplog.text
    feature.close()
    assert feature.summary()["my/set"]["problem_counts"] == {"image does not open": 1}


def test_broken_files_are_listed_even_if_they_stop_the_run(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "bad.png": b"x"})
    feature.dataset_entries([entry(tmp_path / "data", in_memory={"wait": True})])
    with pytest.raises(DatasetCorrupt, match="1 of 2 files are broken"):
        create(feature, "a")
    assert "bad.png" in (tmp_path / "out/gh200/staging-a.json").read_text()


def test_too_large_a_dataset_stops_the_run(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.bin": bytes(100_000)})
    feature.dataset_entries([entry(tmp_path / "data", in_memory={"memory_limit_gb": 1e-6})])
    with pytest.raises(DatasetTooLarge):
        create(feature, "a")


def test_a_second_run_in_the_process_starts_afresh(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    assert create(feature, "a") is not None
    feature.close()
    feature.start(None)
    feature.dataset_entries([{**entry(tmp_path / "data"), "type": "local"}])
    assert create(feature, "a") is None
    assert feature.summary() == {}


def test_a_second_run_finds_the_memory_of_the_first_given_back(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    held = weakref.ref(create(feature, "a").staged)
    arrive(feature)
    feature.start(None)  # the Web UI closes nothing between two runs
    gc.collect()
    assert held() is None


def test_what_simpletuner_never_deals_is_held_whole_and_what_it_did_not_deal_is_said(
    feature: StoreFeature, tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    fill(tmp_path / "data", {"a.png": image(), "a.wav": b"sound"})
    block = {"per_node": "shard", "wait": True}
    sound = entry(tmp_path / "data", "sound", dataset_type="audio", in_memory=block)
    feature.dataset_entries([sound, entry(tmp_path / "data", "pictures", in_memory=block)])
    assert create(feature, "sound").staged.count == 2
    assert create(feature, "pictures").staged.count == 0
    feature.before_train(SimpleNamespace(state={}))
    assert "dataset pictures: SimpleTuner has not dealt it" in caplog.text
    assert "dataset sound:" not in caplog.text


def test_a_shard_is_staged_at_the_first_deal_and_refused_where_nobody_tells_of_deals(
    feature: StoreFeature, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    fill(tmp_path / "data", {"a.png": image(), "a.txt": b"words", "b.png": image(), "b.txt": b"words"})
    shard = entry(tmp_path / "data", "pictures", in_memory={"per_node": "shard"})
    feature.dataset_entries([shard, {**shard, "id": "refused", "resolution": 1}])
    backend = create(feature, "pictures")
    dealt = {"1.0": [str(tmp_path / "data" / "a.png")]}
    feature.samples_dealt(SimpleNamespace(id="pictures", aspect_ratio_bucket_indices=dealt))
    assert backend.staged.count == 2
    staged = backend.staged
    feature.samples_dealt(SimpleNamespace(id="pictures", aspect_ratio_bucket_indices={}))
    assert backend.staged is staged

    feature.runtime.seams["metadata.split_buckets"] = SimpleNamespace(ok=False, status="off: not in this SimpleTuner")
    with pytest.raises(FeatureUnavailable, match=r"per_node.*not in this SimpleTuner"):
        create(feature, "refused")


def test_nodes_are_counted_from_the_launchers_words() -> None:
    assert node_count({}) == 1
    assert node_count({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == 2
    assert node_count({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) == 1


def test_a_share_includes_the_files_beside_each_sample(tmp_path: Path) -> None:
    fill(tmp_path, dict.fromkeys(("a.png", "a.txt", "b.png", "b.txt", "sub/c.png"), b"x"))
    metadata = SimpleNamespace(
        aspect_ratio_bucket_indices={"1.0": [str(tmp_path / "a.png")], "2.0": [str(tmp_path / "sub/c.png")]}
    )
    wanted = node.dealt_stems(metadata)
    listing = list_files(tmp_path).part(lambda path: node.stem(path) in wanted)
    assert sorted(name for batch in listing.batches for name in batch.names) == [b"a.png", b"a.txt", b"c.png"]


def test_a_list_of_broken_files_that_can_not_be_written_ends_no_run(feature, tmp_path: Path, caplog) -> None:
    """A full or closed disk costs the list, not the run; what is broken is still counted."""
    fill(tmp_path / "data", {"bad.png": b"x", **{f"{number}.png": image() for number in range(200)}})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gh200").write_text("no folder can be made here")
    feature.dataset_entries([entry(tmp_path / "data", in_memory={"wait": True})])
    assert create(feature, "a").staged.view(tmp_path / "data/0.png") == image()
    assert "dataset a: 1 image does not open; the list could not be written: " in caplog.text


def test_the_list_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Of a name that is known beforehand, in a folder that others may write to."""
    precious, folder = tmp_path / "precious", tmp_path / "gh200"
    precious.write_text("mine")
    folder.mkdir()
    (folder / f"staging-a.{os.getpid()}.tmp").symlink_to(precious)
    write_problems({"problem_counts": {"unreadable": 1}}, "a", tmp_path)
    assert precious.read_text() == "mine"
    assert json.loads((folder / "staging-a.json").read_text()) == {"problem_counts": {"unreadable": 1}}


def test_reads_from_disk_during_training_are_counted_apart(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    backend = create(feature, "a")
    backend.staged.view(tmp_path / "data" / "aspect_ratio_bucket_indices.json")
    arrive(feature)
    assert "elsewhere_in_training" not in feature.summary()["a"], "nothing is trained yet"
    feature.before_train(SimpleNamespace(state={}))
    assert feature.summary()["a"]["elsewhere"] == 1
    assert feature.summary()["a"]["elsewhere_in_training"] == 0
    backend.staged.view(tmp_path / "data" / "new.png")
    assert feature.summary()["a"]["elsewhere_in_training"] == 1
