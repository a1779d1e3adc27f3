"""Segments: written, sealed, found whole, read; what is damaged, foreign or of another version is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from simpletuner_gh200.held.segment import (
    PLAIN,
    DamagedSegment,
    Segment,
    SegmentFull,
    SegmentWriter,
    key_of,
)
from simpletuner_gh200.memory.mapping import create_memfd

BIG = os.urandom(300_000)


def in_memory(entries: dict[str, bytes], **how: object) -> Segment:
    writer = SegmentWriter(create_memfd("test"), **how)  # type: ignore[arg-type]
    fill(writer, entries)
    return Segment.in_memory(writer.fd)


def fill(writer: SegmentWriter, entries: dict[str, bytes]) -> None:
    for path, payload in entries.items():
        layout = b"[]" if writer._dtype is not PLAIN else None
        writer.put(key_of(path), payload, path=path.encode() if layout else b"", layout=layout, size=len(payload))
    writer.finish("maker")


def on_disk(path: Path, entries: dict[str, bytes]) -> Path:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fill(SegmentWriter(fd), entries)
    os.close(fd)
    return path


def open_pack(path: Path) -> Segment:
    return Segment.on_disk(path, os.open(path, os.O_RDONLY))


@pytest.fixture
def entries() -> dict[str, bytes]:
    return {"/a": b"first", "/b": b"", "/c": BIG}


def test_the_same_bytes_are_a_pack_and_a_segment_in_memory(entries: dict[str, bytes], tmp_path: Path) -> None:
    packed = on_disk(tmp_path / "pack", entries).read_bytes()
    memory = in_memory(entries)
    assert os.pread(memory.fd, memory.size, 0) == packed


def test_plain_rows_carry_a_form_and_neither_path_nor_layout() -> None:
    writer = SegmentWriter(create_memfd("test"), rows=PLAIN)
    writer.put(key_of("/data/1.png"), b"packed", size=60, form=3)
    writer.finish()
    segment = Segment.in_memory(writer.fd)
    row = segment.rows[segment.keys().index(key_of("/data/1.png"))]
    assert (row["size"], row["length"], row["form"]) == (60, 6, 3)
    assert segment.bytes_at(int(row["offset"]), 6).tobytes() == b"packed"
    assert segment.rows.itemsize <= 56


def test_nobody_can_change_it_in_memory(entries: dict[str, bytes]) -> None:
    segment = in_memory(entries)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(ValueError, match="read-only"):
        segment.payload(0)[:] = 0


def test_part_of_an_entry_is_copied(entries: dict[str, bytes], tmp_path: Path) -> None:
    for segment in (in_memory(entries), open_pack(on_disk(tmp_path / "pack", entries))):
        part = np.empty(1000, np.uint8)
        segment.copy_into(part, segment.keys().index(key_of("/c")), skip=64)
        assert part.tobytes() == BIG[64:1064]


def test_claims_end_at_the_limit() -> None:
    writer = SegmentWriter(create_memfd("test"), limit=8192)
    assert writer.claim([100, 10]).tolist() == [4096, 4224]
    with pytest.raises(SegmentFull):
        writer.claim([4096])
    assert writer.claim([64]).tolist() == [4288]  # what did not fit took nothing


@pytest.mark.parametrize("damage", ["cut", "header", "index", "grown", "empty"])
def test_a_damaged_one_is_refused(damage: str, tmp_path: Path, entries: dict[str, bytes]) -> None:
    path = on_disk(tmp_path / "pack", entries)
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[20] ^= 1
    if damage == "index":
        content[-30] ^= 1
    size = {"cut": len(content) - 1, "empty": 0}.get(damage, len(content))
    path.write_bytes(content[:size] + (b"x" if damage == "grown" else b""))
    with pytest.raises(DamagedSegment):
        open_pack(path)


def test_an_empty_one_holds_nothing() -> None:
    segment = in_memory({})
    assert len(segment) == 0 and segment.keys() == []
