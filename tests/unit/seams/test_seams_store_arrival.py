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
from simpletuner_gh200.memory.pace import Pace
from simpletuner_gh200.memory.sharing import PATIENCE_SECONDS, NodeGroup, NodePosition
from simpletuner_gh200.seams.features.store import feature as store_feature
from simpletuner_gh200.seams.features.store.arrival import Arrivals, CountingPace, Promised, StopAt
from simpletuner_gh200.store.coming import ComingDataset, is_caption
from simpletuner_gh200.store.discovery import part_of, walk
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.shared_memory import nothing_staged
from simpletuner_gh200.store.staging import StagingRequest, stage
from tests.unit.seams.test_seams_store import arrive, create, feature
from tests.unit.store.store_samples import fill, image

__all__ = ["feature"]


def staged(folder: Path, **options: Any) -> StagedDataset:
    memory, _report = stage(StagingRequest(folder, **options))
    dataset = StagedDataset(memory)
    memory.close()
    return dataset


def entry(folder: Path, **block: Any) -> dict[str, Any]:
    return {"id": "a", "type": "in_memory", "instance_data_dir": str(folder), "in_memory": block}


def test_captions_are_there_at_once_and_images_when_they_have_arrived(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "a.txt": b"a caption"})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    assert served.view(tmp_path / "data/a.txt") == b"a caption"
    assert served.view(tmp_path / "data/a.png") is None
    arrive(feature)
    assert served.view(tmp_path / "data/a.png") == image()
    assert served.view(tmp_path / "data/a.txt") == b"a caption"
    assert served.summary()["arrived"]
    feature.close()


def test_wait_stages_everything_first(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data", wait=True)])
    assert create(feature, "a").staged.view(tmp_path / "data/a.png") == image()
    feature.close()


def test_what_is_written_before_it_arrives_is_never_served_from_memory(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"old a", "b.txt": b"old b", "c.txt": b"old c"})
    nothing = nothing_staged()
    coming = ComingDataset(StagedDataset(nothing))
    nothing.close()
    coming.forget(tmp_path / "a.txt")
    whole = staged(tmp_path)
    coming.prepare(whole)
    coming.forget(tmp_path / "b.txt")
    coming.arrive()
    assert coming.view(tmp_path / "a.txt") is None
    assert coming.view(tmp_path / "b.txt") is None
    assert coming.view(tmp_path / "c.txt") == b"old c"
    coming.forget(tmp_path / "c.txt")
    assert coming.view(tmp_path / "c.txt") is None


def test_the_ceiling_is_checked_before_training(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.bin": bytes(100_000)})
    feature.dataset_entries([entry(tmp_path / "data", memory_limit_gb=1e-6)])
    with pytest.raises(DatasetTooLarge):
        create(feature, "a")
    feature.close()


def test_the_ceiling_is_told_to_every_rank_before_it_goes_on(feature, tmp_path: Path) -> None:
    """A rank that goes on meets the end of the leader at a barrier, where it learns no reason."""
    fill(tmp_path / "data", {"a.bin": bytes(100_000)})
    leader, other = (NodeGroup(NodePosition(rank, 2, "ceiling"), folder=tmp_path) for rank in (0, 1))
    joining = threading.Thread(target=other.join)
    joining.start()
    leader.join()
    joining.join()
    feature.dataset_entries([entry(tmp_path / "data", memory_limit_gb=1e-6)])
    feature._group = leader
    with pytest.raises(DatasetTooLarge):
        create(feature, "a")
    feature._group = other
    with pytest.raises(SharingError, match="is allowed"):
        create(feature, "a")
    feature.close()
    leader.close()


def test_too_many_broken_files_end_the_run_at_the_next_step_with_the_same_error(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image(), "bad.png": b"x"})
    feature.dataset_entries([entry(tmp_path / "data")])
    create(feature, "a")
    arrive(feature)
    trainer = SimpleNamespace(state={"global_step": 3})
    assert feature.batch_prepared(trainer, {"x": 1}) == {"x": 1}, "this step is finished"
    trainer.state["global_step"] = 4
    with pytest.raises(DatasetCorrupt, match="1 of 2 files are broken"):
        feature.batch_prepared(trainer, {})
    assert "bad.png" in (tmp_path / "out/gh200/staging-a.json").read_text()
    feature.close()


def test_closing_before_it_has_arrived_ends_it(feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", {f"{number}.png": image() for number in range(4)})
    feature.dataset_entries([entry(tmp_path / "data")])
    create(feature, "a")
    begun, go_on = threading.Event(), threading.Event()

    def slow(self, batch):
        begun.set()
        go_on.wait(20)

    monkeypatch.setattr("simpletuner_gh200.store.staging.BatchStager.stage", slow)
    feature.data_ready(None)
    assert begun.wait(20)
    closing = threading.Thread(target=feature.close)
    closing.start()
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert feature.summary()["a"]["arrived"] is False


def test_where_cores_are_few_nothing_comes_before_the_first_step(feature, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.waits_for_first_step", lambda _cores: True)
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    feature.data_ready(None)
    trainer = SimpleNamespace(state={"global_step": 7})
    for _ in range(3):  # batches of one accumulation window, of a run that was resumed
        feature.batch_prepared(trainer, {})
    assert feature._arrivals._job is None
    trainer.state["global_step"] = 8
    feature.batch_prepared(trainer, {})
    assert feature._arrivals.wait(20)
    assert served.view(tmp_path / "data/a.png") == image()
    feature.close()


def test_captions_that_are_on_their_way_hold_nobody_up_but_those_who_read_them(feature, tmp_path: Path, monkeypatch):
    fill(tmp_path / "data", {"a.png": image(), "a.txt": b"old", "b.txt": b"b"})
    feature.dataset_entries([entry(tmp_path / "data")])
    go_on, stage_really = threading.Event(), store_feature.stage

    def slow(*args: Any, **options: Any) -> Any:
        go_on.wait(20)
        return stage_really(*args, **options)

    monkeypatch.setattr(store_feature, "stage", slow)
    served = create(feature, "a").staged
    assert not served.holds(tmp_path / "data/b.txt"), "exists() asks the disk meanwhile"
    served.forget(tmp_path / "data/a.txt")
    reading: list[Any] = []
    reader = threading.Thread(target=lambda: reading.append(served.view(tmp_path / "data/b.txt")))
    reader.start()
    assert not reading
    go_on.set()
    reader.join(20)
    assert reading == [b"b"]
    assert served.view(tmp_path / "data/a.txt") is None, "it was written before it came"
    feature.close()


def test_captions_that_can_not_be_staged_come_from_disk_and_the_run_ends_before_it_trains(
    feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "data", {"a.txt": b"a"})
    feature.dataset_entries([entry(tmp_path / "data")])

    def refused(*_args: Any, **_options: Any) -> Any:
        raise DatasetTooLarge("no room", needed=2, allowed=1)

    monkeypatch.setattr(store_feature, "stage", refused)
    assert create(feature, "a").staged.view(tmp_path / "data/a.txt") is None
    with pytest.raises(DatasetTooLarge, match="no room"):
        feature.data_ready(None)
    feature.close()


def test_a_forked_worker_does_not_wait_for_captions_that_only_its_parent_stages(feature, tmp_path: Path, monkeypatch):
    fill(tmp_path / "data", {"a.txt": b"a"})
    feature.dataset_entries([entry(tmp_path / "data")])
    go_on, stage_really = threading.Event(), store_feature.stage
    monkeypatch.setattr(store_feature, "stage", lambda *a, **o: go_on.wait(20) and stage_really(*a, **o))
    served = create(feature, "a").staged
    child = os.fork()
    if child == 0:
        os._exit(0 if served.view(tmp_path / "data/a.txt") is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    assert served.view(tmp_path / "data/a.txt") == b"a"
    feature.close()


def test_part_of_a_listing(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": b"12345", "a.txt": b"1", "sub/b.txt": b"22", "sub/b.png": b"1"})
    part = part_of(walk(tmp_path), is_caption)
    assert (part.files, part.size) == (2, 3)
    assert sorted(path for batch in part.batches for path in batch.paths()) == [
        str(tmp_path / name).encode() for name in ("a.txt", "sub/b.txt")
    ]
    assert [batch.first for batch in part.batches] == [0, 1]


def two_ranks(tmp_path: Path) -> list[NodeGroup]:
    groups = [NodeGroup(NodePosition(rank, 2, "arrival-test"), folder=tmp_path) for rank in range(2)]
    threads = [threading.Thread(target=group.join, args=(20,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def test_all_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    leader, other = (StopAt(group) for group in two_ranks(tmp_path))
    assert not other.reached(6, wanted=True), "only the leader decides"
    assert not leader.reached(7, wanted=True)
    assert not other.reached(7, wanted=False), "a rank that is behind finishes the step too"
    assert leader.reached(8, wanted=True)
    assert other.reached(8, wanted=False)


def test_a_rank_serves_from_memory_only_when_all_have_forgotten_what_they_wrote(tmp_path: Path) -> None:
    """Both ranks attach the same memory; what one of them wrote, the other must not read from it."""
    fill(tmp_path / "data", {"a.txt": b"old"})
    memory, _report = stage(StagingRequest(tmp_path / "data"))
    held = [StagedDataset(memory), StagedDataset(memory)]
    memory.close()
    nothing = nothing_staged()
    coming = [ComingDataset(StagedDataset(nothing)) for _ in range(2)]
    nothing.close()
    coming[1].forget(tmp_path / "data/a.txt")
    arrivals = [Arrivals(group, lambda _dataset: None) for group in two_ranks(tmp_path)]
    for one, dataset, whole in zip(arrivals, coming, held, strict=True):
        one.expect("a", dataset, lambda _pace, _effort, whole=whole: whole)
    arrivals[0].begin()
    assert not arrivals[0].wait(0.2)
    assert not coming[0].arrived, "the other rank has not said what it wrote"
    arrivals[1].begin()
    assert all(one.wait(20) for one in arrivals)
    assert [dataset.view(tmp_path / "data/a.txt") for dataset in coming] == [None, None]
    for one in arrivals:
        one.close()


def test_a_dataset_that_is_added_after_the_first_has_arrived_comes_too(feature, tmp_path: Path) -> None:
    for name in "ab":
        fill(tmp_path / name, {f"{name}.png": image()})
    feature.dataset_entries([entry(tmp_path / name) | {"id": name} for name in "ab"])
    first = create(feature, "a").staged
    assert first.view(tmp_path / "a/a.png") is None, "and somebody has use for it now"
    assert feature._arrivals.wait(20)
    assert first.arrived
    second = create(feature, "b").staged
    arrive(feature)
    assert second.view(tmp_path / "b/b.png") == image()
    feature.close()


def test_what_is_promised_to_one_dataset_is_not_promised_to_the_next(
    feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine on which either fits, and not both; the first is still on its way when the second is checked."""
    for name in "ab":
        fill(tmp_path / name, {"x.bin": bytes(3 << 20)})
    feature.dataset_entries([entry(tmp_path / name) | {"id": name} for name in "ab"])
    machine = HostMemory(total=0, free=0, available=STAGING_WORK + (5 << 20), limit="test")
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.host_memory", lambda: machine)
    create(feature, "a")
    assert feature.memory_to_come() == 3 << 20
    with pytest.raises(DatasetTooLarge, match="needs 3 MiB in memory, and 2 MiB is allowed"):
        create(feature, "b")
    arrive(feature)
    assert feature.memory_to_come() == 0
    feature.close()


def test_what_is_promised_to_a_dataset_is_there_for_its_captions(
    feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "data", {"a.png": os.urandom(3 << 20), "a.txt": b"a caption" * 10_000})
    feature.dataset_entries([entry(tmp_path / "data", verify="none")])
    machine = HostMemory(total=0, free=0, available=STAGING_WORK + (3 << 20) + 100_000, limit="test")
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.host_memory", lambda: machine)
    served = create(feature, "a").staged
    feature.data_ready(None)
    assert served.view(tmp_path / "data/a.txt") == b"a caption" * 10_000
    feature.close()


def test_what_has_come_is_not_to_come_any_more(tmp_path: Path) -> None:
    leader, other = (Promised(group) for group in two_ranks(tmp_path))
    leader.set("a", 100)
    leader.set("b", 10)
    seen = []
    pace = CountingPace(Pace(), lambda done: leader.set("a", 100 - done))
    for size in (30, 50):
        pace.rest(size)
        seen.append(other.bytes)
    assert seen == [80, 30], "every rank knows"


def test_a_forked_worker_that_reads_images_stages_nothing(feature, tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    served = create(feature, "a").staged
    child = os.fork()
    if child == 0:
        served.view(tmp_path / "data/a.png")
        os._exit(0 if feature._arrivals._job is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert served.view(tmp_path / "data/a.png") is None
    assert feature._arrivals._job is not None, "the rank itself does"
    feature.close()


def test_a_rank_that_prepares_data_for_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than anybody's patience elsewhere; and closing ends the wait."""
    monkeypatch.setattr("simpletuner_gh200.memory.sharing.BEAT_SECONDS", 0.01)
    groups = two_ranks(tmp_path)
    nothing = nothing_staged()
    coming, whole = ComingDataset(StagedDataset(nothing)), StagedDataset(nothing)
    nothing.close()
    for group in groups:
        group.patience = NodeGroup.from_environment("arrivals", {}, patience=None).patience
    leader, other = (Arrivals(group, lambda _dataset: None) for group in groups)
    leader.expect("a", coming, lambda _pace, _effort: whole)
    leader.begin()
    assert not leader.wait(0.3)
    leader.end_if_failed(0)
    leader.end_if_failed(9)
    leader.close()
    assert leader.wait(20)
    assert leader._job.state == "stopped"
    other.close()


def test_nobody_grows_impatient_with_datasets_on_their_way(feature) -> None:
    assert feature._arrivals.group.patience is None
    assert feature._group.patience == PATIENCE_SECONDS
    feature.close()


def test_looking_through_a_large_folder_is_no_silence(feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", {"a.png": image()})
    feature.dataset_entries([entry(tmp_path / "data")])
    beats = []
    monkeypatch.setattr(feature._group, "beat", lambda: beats.append(True))
    at_once = (nothing_staged(), None)
    monkeypatch.setattr("simpletuner_gh200.seams.features.store.feature.stage", lambda *_words, **_more: at_once)
    create(feature, "a")
    assert beats
    feature.close()
