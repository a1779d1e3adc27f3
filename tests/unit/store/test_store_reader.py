"""Serving: any spelling of a path, never damaged or outdated bytes, shared by processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import xxhash

from simpletuner_gh200.memory.sharing import NodeGroup, NodePosition
from simpletuner_gh200.store.reader import DAMAGED, HASHED_AT_ONCE, StagedDataset, checksum
from simpletuner_gh200.store.scrub import Scrub
from simpletuner_gh200.store.shared_memory import receive_memory, share_memory
from simpletuner_gh200.store.staging import StagingRequest, stage
from tests.unit.store.store_samples import fill, image, roomy, staged


def test_any_spelling_of_a_path_finds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"sub/a.txt": b"content"})
    dataset, _report = staged(tmp_path)
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / "sub" / "a.txt")
    for path in (
        absolute,
        Path(absolute),
        os.fsencode(absolute),
        "sub/a.txt",
        Path("sub/a.txt"),
        f"{tmp_path}/./sub/../sub/a.txt",
    ):
        assert dataset.view(path) == b"content", path
    assert dataset.view("sub/b.txt") is None
    assert dataset.view("") is None


def test_other_paths_through_links_find_the_file(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", {"inner/x.txt": b"linked"})
    root = tmp_path / "root"
    root.mkdir()
    (root / "one").symlink_to(outside)
    (root / "two").symlink_to(outside)
    dataset, _report = staged(root)
    for path in (root / "one/inner/x.txt", root / "two/inner/x.txt", outside / "inner/x.txt"):
        assert dataset.view(path) == b"linked", path


def test_names_that_are_no_text_are_found(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n\x1b[31m.txt")
    fill(tmp_path, {name: b"strange"})
    dataset, _report = staged(tmp_path)
    assert dataset.view(f"{tmp_path}/{name}") == b"strange"


def test_what_was_forgotten_is_left_to_the_disk_in_every_process(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"1", "b.txt": b"2"})
    dataset, _report = staged(tmp_path)
    child = os.fork()
    if child == 0:
        dataset.forget(tmp_path / "a.txt")
        os._exit(0)
    os.waitpid(child, 0)
    assert not dataset.holds(tmp_path / "a.txt")
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.view(tmp_path / "b.txt") == b"2"


def damaged(folder: Path, compression: str | None) -> StagedDataset:
    """A dataset whose memory changed after it was staged, as a failing memory cell would do it."""
    memory, _report = stage(StagingRequest(folder, compression=compression), host=roomy)
    dataset = StagedDataset(memory)
    content = bytearray(os.pread(memory.data, os.fstat(memory.data).st_size, 0))
    content[len(content) // 2] ^= 0x10
    dataset._data = memoryview(bytes(content))
    memory.close()
    return dataset


@pytest.mark.parametrize("compression", [None, "lz4", "zlib", "snappy", "zstd"])
def test_damage_is_found_on_first_use_and_never_served(tmp_path: Path, compression: str | None) -> None:
    fill(tmp_path, {"a.txt": b"some caption " * 100})
    dataset = damaged(tmp_path, compression)
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.counts.mismatches == 1


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_the_scrub_finds_damage_that_nobody_has_read(tmp_path: Path, compression: str | None) -> None:
    fill(tmp_path, {"a.txt": b"some caption " * 100, "empty.txt": b""})
    scrub = Scrub(damaged(tmp_path, compression), bytes_per_second=1e12)
    assert scrub.one_pass() == 1
    assert scrub.one_pass() == 0, "known by now"
    assert DAMAGED in bytes(scrub._dataset._state)


def test_the_scrub_runs_in_the_background_and_stops(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"fine"})
    scrub = Scrub(staged(tmp_path)[0], bytes_per_second=1e12, pause=60)
    scrub.start()
    deadline = time.monotonic() + 10
    while not scrub.passes and time.monotonic() < deadline:
        time.sleep(0.01)
    scrub.stop()
    assert (scrub.passes, scrub.damaged) == (1, 0)
    assert not scrub._thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, HASHED_AT_ONCE, HASHED_AT_ONCE + 1, 2 * HASHED_AT_ONCE + 5])
def test_hashing_in_pieces_is_hashing(size: int) -> None:
    content = os.urandom(size)
    assert checksum(memoryview(content)) == xxhash.xxh3_64_intdigest(content)


def group(rank: int, folder: Path) -> NodeGroup:
    environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29617"}
    return NodeGroup(NodePosition.from_environment("reader", environment), folder=folder)


def test_another_rank_serves_the_same_memory_and_tells_of_its_writes(tmp_path: Path) -> None:
    root = fill(tmp_path / "data", {"a.png": image(), "b.txt": b"text " * 100})
    meeting = tmp_path / "meet"
    meeting.mkdir()
    child = os.fork()
    if child == 0:
        mine = group(1, meeting)
        mine.join(10)
        dataset = StagedDataset(receive_memory(mine, "data"))
        fine = dataset.view(root / "b.txt") == b"text " * 100 and dataset.view(root / "a.png") == image()
        dataset.forget(root / "b.txt")
        os._exit(0 if fine else 1)
    leader = group(0, meeting)
    leader.join(10)
    memory, _report = stage(StagingRequest(root, compression="lz4"), host=roomy)
    share_memory(leader, "data", memory)
    dataset = StagedDataset(memory)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dataset.view(root / "b.txt") is None, "the other rank wrote it"
    assert dataset.holds(root / "a.png")
    memory.close()
