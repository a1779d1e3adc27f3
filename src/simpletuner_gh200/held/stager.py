"""One staging thread's work: read a batch of files through a small hot buffer, check, hash, compress, write out.

Fresh memory costs far more to touch than a file costs to read. So every byte passes through one buffer that stays in
the core's cache, and is written once into the segment, where the kernel fills pages instead of zeroing them first.

What is staged of a file is one state of it. File times move in ticks of up to 10 ms, and only when a write begins:
within them a file that is half written looks like one that holds still. So what was changed just before it is read
comes later, when everything else was read, and only if it has been left alone for a while by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from simpletuner_gh200.held.bulk import TAKEN, FileReader, library_if_any
from simpletuner_gh200.held.codecs import CHUNK_BYTES, CHUNKED, Codec, CodecChoice
from simpletuner_gh200.held.files import CHUNK_ENTRY
from simpletuner_gh200.held.image_check import Verify, check_image, image_formats
from simpletuner_gh200.held.listing import BATCH_BYTES, BATCH_FILES, FileBatch
from simpletuner_gh200.held.segment import (
    ALIGNMENT,
    PLAIN,
    Piece,
    SegmentFull,
    SegmentWriter,
    aligned,
    key_of,
    words_of_keys,
)
from simpletuner_gh200.held.staging_report import FileProblem, FileProblems, extension_of
from simpletuner_gh200.memory.regular_files import NotRegular, open_regular

BUFFER_BYTES = BATCH_BYTES + BATCH_FILES * ALIGNMENT + (64 << 10)
"""A little more than a batch, so that files that grew since they were listed still fit."""

ATTEMPTS = 3
RECENT_NS = 2_000_000_000
"""Who changed a file this long before it is read may still be at it."""
SETTLED_NS = 100_000_000
"""Whoever has left a file alone this long is done, if it was one write."""


class Unstable(Exception):
    """The file kept changing while it was read."""


@dataclass
class StagingPlan:
    """What all threads share."""

    writer: SegmentWriter
    choice: CodecChoice
    verify: Verify
    problems: FileProblems
    give_back: bool = True
    """Drop the page cache of what was staged: it would hold the dataset a second time."""
    recent: list[FileBatch] | None = field(default_factory=list)
    """What was changed just before, to be read later; None when that is now, and what is still changing is left out."""

    def lately(self) -> Callable[[Any, Any], Any]:
        """Of a file's two times, or of many files': was it changed just before now?

        A time to come is no write's, but one that somebody has set: then the other one tells.
        """
        now = time.time_ns()
        since = now - (SETTLED_NS if self.recent is None else RECENT_NS)
        return lambda mtime_ns, ctime_ns: (ctime_ns > since) | ((since < mtime_ns) & (mtime_ns <= now))


@dataclass(frozen=True)
class _Kind:
    """How files of one extension are treated."""

    codec: Codec
    image_format: str | None
    """Pillow's name for it, where it is an image that has to be checked."""


class BatchStager:
    """Lives in one thread; owns its buffer."""

    def __init__(self, plan: StagingPlan) -> None:
        self._plan = plan
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._kinds: dict[bytes, _Kind] = {}
        native = library_if_any()
        self._reader = FileReader(native, self._buffer, BATCH_FILES) if native else None
        self.checked = 0
        """Images looked at."""

    def stage(self, batch: FileBatch) -> bool:
        """False where some of it was put off."""
        alone = self._together(batch)
        if alone is None:
            return False
        for path in alone:
            try:
                fd = open_regular(path)
                try:
                    self._alone(fd, path)
                finally:
                    os.close(fd)
            except NotRegular:
                self._plan.problems.add(FileProblem(path, "unstable", "it was a file when it was listed"))
            except Unstable:
                self._plan.problems.add(FileProblem(path, "unstable", "it kept changing while it was read"))
            except OSError as unreadable:
                self._plan.problems.add(FileProblem.from_error(path, unreadable))
        return True

    def _together(self, batch: FileBatch) -> list[bytes] | None:
        """Stage what is small and holds still, read in one call; the others, which need more care. None: put off."""
        paths = list(batch.paths())
        if self._reader is None or batch.sizes[0] > BATCH_BYTES:
            return paths
        lately = self._plan.lately()
        files = self._reader.read(batch.folder, batch.names, give_back=self._plan.give_back)
        recent = lately(files["mtime_ns"].astype(np.int64), files["ctime_ns"].astype(np.int64))
        if self._plan.recent is not None and recent.any():
            self._plan.recent.append(batch)
            return None
        taken = files["status"] == TAKEN
        chosen = np.flatnonzero(taken & ~recent)
        if len(chosen):
            starts, sizes = files["content"][chosen].tolist(), files["content_size"][chosen].tolist()
            contents = [self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            in_place = self._buffer[: starts[-1] + sizes[-1]] if len(chosen) == taken.sum() else None
            self._take([paths[at] for at in chosen.tolist()], contents, in_place)
        return [paths[at] for at in np.flatnonzero(~taken | recent).tolist()]

    def _take(self, paths: list[bytes], contents: Sequence[memoryview], together: Piece | None) -> None:
        """Check, compress, hash and write whole files; ``together``: they lie in the buffer as they will in memory."""
        pieces: list[Piece] = []
        rows = np.zeros(len(paths), PLAIN)
        forms, sums = [], []
        for path, content in zip(paths, contents, strict=True):
            kind = self._kinds.get(path[path.rfind(b".") :]) or self._kind(path)
            if kind.image_format is not None:
                self._check(path, content, True, -1, kind.image_format)
            piece = _smaller(kind.codec, content)
            pieces.append(piece)
            forms.append(kind.codec.number if piece is not content else 0)
            sums.append(xxhash.xxh3_64_intdigest(content))
        rows["form"], rows["checksum"] = forms, np.array(sums, np.uint64)
        rows["size"], rows["length"] = list(map(len, contents)), list(map(len, pieces))
        rows["offset"] = starts = self._plan.writer.claim(rows["length"])
        self._write(int(starts[0]), _laid_out(pieces) if together is None or any(forms) else together)
        self._add(paths, rows)

    def _alone(self, fd: int, path: bytes) -> None:
        """One file, of any size; Unstable, and nothing to be found, where it does not hold still."""
        kind = self._kind(path)
        for attempt in range(ATTEMPTS):
            lately, before = self._plan.lately(), os.fstat(fd)
            if lately(before.st_mtime_ns, before.st_ctime_ns):
                if self._plan.recent is None:
                    raise Unstable
                folder, slash, name = path.rpartition(b"/")
                self._plan.recent.append(FileBatch(folder + slash, [name], [0]))  # its size was counted
                return
            try:
                if kind.image_format is not None and not attempt:
                    whole = before.st_size <= CHUNK_BYTES
                    self._check(path, self._chunk(fd, 0, before.st_size), whole, fd, kind.image_format)
                row = self._copy(fd, before.st_size, kind.codec)
                if os.pread(fd, 1, before.st_size):
                    raise Unstable
            except Unstable:
                continue
            if _appearance(os.stat(path)) == _appearance(before):
                if self._plan.give_back:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._add([path], row)
                return
        raise Unstable

    def _copy(self, fd: int, size: int, codec: Codec) -> np.ndarray:
        """The row of a file that was written piece by piece."""
        row = np.zeros(1, PLAIN)
        digest, chunks = xxhash.xxh3_64(), range(0, size, CHUNK_BYTES)
        if codec.name == "raw":
            row["offset"] = start = self._plan.writer.claim([size])[0]
            for at in chunks:
                chunk = self._chunk(fd, at, size)
                digest.update(chunk)
                self._write(int(start) + at, chunk)
            row["length"] = size
        else:
            table = np.zeros(len(chunks), CHUNK_ENTRY)
            for number, at in enumerate(chunks):
                chunk = self._chunk(fd, at, size)
                digest.update(chunk)
                table[number] = self._append(_smaller(codec, chunk))
            row["offset"], row["length"] = self._append(table.tobytes())
            row["form"] = codec.number | CHUNKED
        row["size"], row["checksum"] = size, digest.intdigest()
        return row

    def _append(self, piece: Piece) -> tuple[int, int]:
        start, size = int(self._plan.writer.claim([len(piece)])[0]), len(piece)
        self._write(start, piece)
        return start, size

    def _write(self, offset: int, piece: Piece) -> None:
        """Memory that the kernel does not give is the ceiling too, not trouble with the file that is being read."""
        try:
            self._plan.writer.write(offset, piece)
        except OSError as refused:
            raise SegmentFull(self._plan.writer.used) from refused

    def _add(self, paths: list[bytes], rows: np.ndarray) -> None:
        words = words_of_keys([key_of(path) for path in paths])
        rows["key_low"], rows["key_high"] = words[:, 0], words[:, 1]
        self._plan.writer.add(rows)

    def _chunk(self, fd: int, done: int, size: int) -> memoryview:
        """The next bytes of a file of ``size``, as much as a chunk; Unstable where it ends early."""
        wanted, got = min(CHUNK_BYTES, size - done), 0
        while got < wanted:
            more = os.preadv(fd, [self._buffer[got:wanted]], done + got)
            if more == 0:
                raise Unstable
            got += more
        return self._buffer[:got]

    def _kind(self, path: bytes) -> _Kind:
        extension = extension_of(path)
        formats = image_formats() if self._plan.verify != "none" else {}
        kind = _Kind(self._plan.choice.for_extension(extension), formats.get(extension))
        self._kinds[path[path.rfind(b".") :]] = kind
        return kind

    def _check(self, path: bytes, head: bytes | memoryview, whole: bool, fd: int, expected: str) -> None:
        self.checked += 1
        if not head:
            self._plan.problems.add(FileProblem(path, "empty image"))
            return
        fine, why = check_image(head, whole, fd, expected, self._plan.verify)
        if not fine:
            opens = self._plan.verify == "header" or not check_image(head, whole, fd, expected, "header")[0]
            self._plan.problems.add(FileProblem(path, "image does not open" if opens else "image does not decode", why))


def _appearance(found: os.stat_result) -> tuple[int, ...]:
    """All by which a change of the file, or another file in its place, shows."""
    return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _smaller(codec: Codec, content: memoryview) -> Piece:
    """The compressed bytes, or ``content`` itself where they are not smaller."""
    if codec.name == "raw" or not content:
        return content
    packed = codec.compress(content)
    return packed if len(packed) < len(content) else content


def _laid_out(pieces: Sequence[Piece]) -> bytearray:
    """One behind the other, each where the writer's claim has its place."""
    made = bytearray(sum(aligned(len(piece)) for piece in pieces))
    at = 0
    for piece in pieces:
        made[at : at + len(piece)] = piece
        at += aligned(len(piece))
    return made
