"""Datasets that come into memory while training runs: read from disk until then, and no rank trains on alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.errors import DatasetCorrupt, DatasetTooLarge, SharingError
from simpletuner_gh200.memory.ceilings import STAGING_WORK
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.seams.features.store import feature as store_feature
from simpletuner_gh200.seams.features.store.feature import StoreFeature
from simpletuner_gh200.seams.features.store.node import NodeNotes
from tests.unit.held.held_samples import fill, image
from tests.unit.seams.test_seams_store import arrive, create, feature

__all__ = ["feature"]


def entry(folder: Path, **block: Any) -> dict[str, Any]:
    return {"id": "a", "type": "in_memory", "instance_data_dir": str(folder), "in_memory": block}


def two_ranks(tmp_path: Path) -> list[NodeGroup]:
    groups = [NodeGroup(rank, 2, str(tmp_path)[-64:]) for rank in range(2)]
    threads = [threading.Thread(target=group.join, args=(20,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def test_captions_are_there_at_once_and_images_when_they_have_arrived(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "a.txt": b"a caption", "b.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    assert served.view(tmp_path / "data/a.txt") == b"a caption"
    assert not served.holds(tmp_path / "data/a.png")
    served.forget(tmp_path / "data/b.png")
    arrive(feature)
    assert served.view(tmp_path / "data/a.png") == image()
    assert served.view(tmp_path / "data/a.txt") == b"a caption"
    assert served.view(tmp_path / "data/b.png") is None, "it was written before it came"
    found = feature.summary()["a"]
    assert (found["arrived"], found["files"], found["staged"], found["bytes"]) == (True, 3, 3, 2 * len(image()) + 9)
    assert found["codecs"] == {"raw": 3}


def test_wait_stages_everything_first(feature: StoreFeature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data", wait=True)])
    assert create(feature, "a").staged.view(tmp_path / "data/a.png") == image()


def test_another_rank_of_the_node_finds_what_the_leader_staged(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "a.txt": b"a caption"})
    leader, other = two_ranks(tmp_path)
    second = StoreFeature()
    second.runtime = feature.runtime
    for one, group in ((feature, leader), (second, other)):
        one._notes = NodeNotes(group)
        one.dataset_entries([entry(tmp_path / "data")])
    served = [create(one, "a").staged for one in (feature, second)]
    assert [one.view(tmp_path / "data/a.txt") for one in served] == [b"a caption"] * 2
    served[1].forget(tmp_path / "data/a.txt")
    assert second.memory_to_come() == len(image())
    arrive(feature)
    assert [one.view(tmp_path / "data/a.png") for one in served] == [image()] * 2
    assert [one.view(tmp_path / "data/a.txt") for one in served] == [None] * 2
    assert second.memory_to_come() == 0
    second.close()


def test_the_ceiling_is_told_to_every_rank_before_it_goes_on(feature, tmp_path: Path) -> None:
    """A rank that goes on meets the end of the leader at a barrier, where it learns no reason."""
    fill(tmp_path / "data", {"a.bin": bytes(100_000)})
    leader, other = two_ranks(tmp_path)
    feature.dataset_entries([entry(tmp_path / "data", memory_limit_gb=1e-6)])
    feature._notes.group = leader
    with pytest.raises(DatasetTooLarge):
        create(feature, "a")
    feature._held.clear()
    feature._notes.group = other
    with pytest.raises(SharingError, match="is allowed"):
        create(feature, "a")
    leader.close()


def test_too_many_broken_files_end_the_run_at_the_next_step_with_the_same_error(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "bad.png": b"x"})
    (tmp_path / "data" / "gone.png").symlink_to("nowhere")
    feature.dataset_entries([entry(tmp_path / "data")])
    create(feature, "a")
    arrive(feature)
    trainer = SimpleNamespace(state={"global_step": 3})
    assert feature.batch_prepared(trainer, {"x": 1}) == {"x": 1}, "this step is finished"
    trainer.state["global_step"] = 4
    with pytest.raises(DatasetCorrupt, match="1 of 2 files are broken"):
        feature.batch_prepared(trainer, {})
    listed = (tmp_path / "out/gh200/staging-a.json").read_text()
    assert "bad.png" in listed
    assert "gone.png" in listed, "what was met when the folder was listed is told with the rest"
    assert feature.summary()["a"]["arrived"] is False


def test_all_ranks_end_at_the_same_step_for_the_same_reason(tmp_path: Path) -> None:
    leader, other = (NodeNotes(group) for group in two_ranks(tmp_path))
    assert other.failure(6, "mine") is None, "only the leader decides"
    assert leader.failure(7, "too many größer" * 1000) is None
    assert other.failure(7, None) is None, "a rank that is behind finishes the step too"
    for rank in (leader, other):
        assert str(rank.failure(8, None)).startswith("too many größer")


def test_closing_before_it_has_arrived_ends_it(feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", {f"{number}.png": image() for number in range(4)})
    feature.dataset_entries([entry(tmp_path / "data")])
    create(feature, "a")
    begun, go_on = threading.Event(), threading.Event()

    def slow(self, batch):
        begun.set()
        go_on.wait(20)

    monkeypatch.setattr("simpletuner_gh200.held.staging.BatchStager.stage", slow)
    feature.data_ready(None)
    assert begun.wait(20)
    closing = threading.Thread(target=feature.close)
    closing.start()
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert feature.summary()["a"]["arrived"] is False


def test_where_cores_are_few_nothing_comes_before_the_first_step(feature, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store_feature, "waits_for_first_step", lambda _cores: True)
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    feature.data_ready(None)
    trainer = SimpleNamespace(state={"global_step": 7})
    feature.before_train(trainer)
    for _ in range(3):  # batches of one accumulation window, of a run that was resumed
        feature.batch_prepared(trainer, {})
    assert feature._job is None
    trainer.state["global_step"] = 8
    feature.batch_prepared(trainer, {})
    assert feature._job.wait(20)
    assert served.view(tmp_path / "data/a.png") == image()


def test_a_dataset_that_is_added_after_the_first_has_arrived_comes_too(feature, tmp_path: Path) -> None:
    for name in "ab":
        fill(tmp_path / name, {f"{name}.png": image()})
    feature.dataset_entries([entry(tmp_path / name) | {"id": name} for name in "ab"])
    first = create(feature, "a").staged
    assert first.view(tmp_path / "a/a.png") is None, "and somebody has use for it now"
    assert feature._job.wait(20)
    assert first.view(tmp_path / "a/a.png") == image()
    second = create(feature, "b").staged
    arrive(feature)
    assert second.view(tmp_path / "b/b.png") == image()


def test_what_is_promised_to_one_dataset_is_not_promised_to_the_next(
    feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine on which either fits, and not both; the first is still on its way when the second is checked."""
    for name in "ab":
        fill(tmp_path / name, {"x.bin": bytes(3 << 20)})
    feature.dataset_entries([entry(tmp_path / name) | {"id": name} for name in "ab"])
    machine = HostMemory(total=0, free=0, available=STAGING_WORK + (5 << 20), limit="test")
    monkeypatch.setattr(store_feature, "host_memory", lambda: machine)
    create(feature, "a")
    assert feature.memory_to_come() == 3 << 20
    with pytest.raises(DatasetTooLarge, match="needs 3 MiB in memory, and 2 MiB is allowed"):
        create(feature, "b")
    arrive(feature)
    assert feature.memory_to_come() == 0


def test_a_forked_worker_that_reads_images_stages_nothing(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    child = os.fork()
    if child == 0:
        served.view(tmp_path / "data/a.png")
        os._exit(0 if feature._job is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    served.view(tmp_path / "data/a.png")
    assert feature._job is not None, "the rank itself does"


def test_looking_through_a_large_folder_is_no_silence(feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    beats = []
    monkeypatch.setattr(feature._notes.group, "beat", lambda: beats.append(True))
    monkeypatch.setattr(feature, "_stage", lambda *_words, **_more: None)
    create(feature, "a")
    assert beats
