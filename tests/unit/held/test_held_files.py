"""Serving: any spelling of a path, never damaged or outdated bytes, shared by processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import xxhash

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.held.files import HASHED_AT_ONCE, Forgotten, HeldFiles, checksum
from simpletuner_gh200.held.shelf import Board
from simpletuner_gh200.held.staging import stage
from tests.unit.held.held_samples import fill, image, in_child, roomy, staged


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


def test_other_paths_through_links_find_the_file_and_forget_it(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", {"inner/x.txt": b"linked"})
    root = tmp_path / "root"
    root.mkdir()
    (root / "one").symlink_to(outside)
    (root / "two").symlink_to(outside)
    dataset, _report = staged(root)
    paths = (root / "one/inner/x.txt", root / "two/inner/x.txt", outside / "inner/x.txt")
    assert [dataset.view(path) for path in paths] == [b"linked"] * 3
    dataset.forget(paths[2])
    assert [dataset.view(path) for path in paths] == [None] * 3


def test_names_that_are_no_text_are_found(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n\x1b[31m.txt")
    fill(tmp_path, {name: b"strange"})
    dataset, _report = staged(tmp_path)
    assert dataset.view(f"{tmp_path}/{name}") == b"strange"


def test_what_is_written_before_it_is_staged_is_never_served(tmp_path: Path) -> None:
    """By whichever rank: what is forgotten is known by its path, not by where it is held."""
    fill(tmp_path, {"a.txt": b"1", "b.txt": b"2"})
    forgotten, board = Forgotten.alone(), Board.create(2)
    leader, other = (HeldFiles(board, rank, forgotten) for rank in range(2))
    other.forget(tmp_path / "a.txt")
    assert leader.view(tmp_path / "b.txt") is None
    leader.publish(stage(tmp_path, host=roomy)[0])
    for rank in (leader, other):
        assert rank.view(tmp_path / "a.txt") is None
        assert rank.view(tmp_path / "b.txt") == b"2"
    assert leader.summary() == {
        "files": 2,
        "held_bytes": leader.held_bytes,
        "served": 1,
        "elsewhere": 2,
        "mismatches": 0,
    }


def test_reads_of_what_is_not_there_are_told_but_for_what_is_never_held(tmp_path: Path) -> None:
    told: list[bool] = []
    files = HeldFiles(Board.create(), 0, Forgotten.alone(), lambda: told.append(True))
    files.view(tmp_path / "aspect_ratio_bucket_indices.json")
    assert not told
    files.view(tmp_path / "a.png")
    assert told


@pytest.mark.parametrize("compression", [None, "lz4", "zlib", "snappy", "zstd"])
def test_damage_is_found_on_first_use_and_never_served(tmp_path: Path, compression: str | None) -> None:
    """The memory changed after it was staged, as a failing memory cell would do it."""
    fill(tmp_path, {"a.txt": b"some caption " * 100})
    segment, _report = stage(tmp_path, InMemorySettings(compression=compression), host=roomy)
    content = bytearray(segment.data)
    content[segment.offset[0] + segment.length[0] // 2] ^= 0x10
    segment.data = memoryview(bytes(content))
    dataset = HeldFiles.alone(segment)
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.view(tmp_path / "a.txt") is None
    assert dataset.counts.mismatches == 1


@pytest.mark.parametrize("size", [0, 1, HASHED_AT_ONCE, HASHED_AT_ONCE + 1, 2 * HASHED_AT_ONCE + 5])
def test_hashing_in_pieces_is_hashing(size: int) -> None:
    content = os.urandom(size)
    assert checksum(memoryview(content)) == xxhash.xxh3_64_intdigest(content)


def test_another_rank_serves_the_same_memory_and_tells_of_its_writes(tmp_path: Path) -> None:
    root = fill(tmp_path, {"a.png": image(), "b.txt": b"text " * 100})
    forgotten, board = Forgotten.alone(), Board.create(2)
    leader = HeldFiles(board, 0, forgotten)
    leader.publish(stage(root, InMemorySettings(compression="lz4"), host=roomy)[0])

    def work() -> bool:
        mine = HeldFiles(Board.attach(os.dup(board.fd)), 1, forgotten)
        fine = mine.view(root / "b.txt") == b"text " * 100 and mine.view(root / "a.png") == image()
        mine.forget(root / "b.txt")
        return fine

    assert in_child(work)
    assert leader.view(root / "b.txt") is None, "the other rank wrote it"
    assert leader.holds(root / "a.png")


def test_a_child_that_is_forked_while_something_is_published_waits_for_nobody(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"1"})
    forgotten, board = Forgotten.alone(), Board.create(2)
    leader, other = (HeldFiles(board, rank, forgotten) for rank in range(2))
    leader.publish(stage(tmp_path, host=roomy)[0])
    locked, done = threading.Event(), threading.Event()

    def publishing() -> None:
        with other._shelf._lock:
            locked.set()
            done.wait(20)

    thread = threading.Thread(target=publishing)
    thread.start()
    assert locked.wait(20)
    assert in_child(lambda: other.view(tmp_path / "a.txt") == b"1")
    done.set()
    thread.join()
