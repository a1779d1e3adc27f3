"""One staging thread's work: read a batch of files through a small hot buffer, check, hash, compress, write out.

Fresh memory costs far more to touch than a file costs to read. So every byte passes through one buffer that stays in
the core's cache, and is written once into the slab, where the kernel fills pages instead of zeroing them first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import xxhash

from simpletuner_gh200.memory.regular_files import NotRegular, open_regular
from simpletuner_gh200.store.codecs import CHUNK_BYTES, Codec, CodecChoice
from simpletuner_gh200.store.discovery import BATCH_BYTES, Batch, extension_of
from simpletuner_gh200.store.file_reader import (
    ATTEMPTS,
    Unstable,
    appearance,
    checksum_on_disk,
    is_cold,
    is_recent,
    read_ahead,
    read_small,
)
from simpletuner_gh200.store.image_check import Verify, check_image, image_formats
from simpletuner_gh200.store.index import ABSENT, CHUNK_ENTRY, CHUNKED, Rows, halves
from simpletuner_gh200.store.native import CHANGED_JUST_BEFORE, BatchReader, usable
from simpletuner_gh200.store.problems import FileProblem, FileProblems
from simpletuner_gh200.store.slab_writer import Piece, SlabWriter

BUFFER_BYTES = BATCH_BYTES + (64 << 10)
"""A little more than a batch, so that files that grew since they were listed still fit."""

READ_AHEAD_FILES = 64
TINY_BYTES = 16 << 10
"""Up to here a fresh object is cheaper than a slice of the buffer."""


@dataclass
class StagingPlan:
    """What all threads share."""

    rows: Rows
    slab: SlabWriter
    choice: CodecChoice
    verify: Verify
    problems: FileProblems
    give_back: bool = True
    """Drop the page cache of what was staged: it would hold the dataset a second time."""

    def __post_init__(self) -> None:
        self.recent = np.zeros(self.rows.count, bool)
        """By number: was the file changed just before it was read?"""


class _Pending:
    """Files of a batch that are read but not yet written: columns of what will be their rows."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.numbers: list[int] = []
        self.pieces: list[Piece] = []
        self.keys: list[bytes] = []
        self.sizes: list[int] = []
        self.checksums: list[int] = []
        self.forms: list[int] = []


@dataclass(frozen=True)
class _Kind:
    """How files of one extension are treated."""

    codec: Codec
    image_format: str | None
    """Pillow's name for it, where it is an image that has to be checked."""


@dataclass(frozen=True)
class _Copied:
    """Where a large file went."""

    offset: int
    stored: int
    checksum: int
    form: int


class BatchStager:
    """Lives in one thread; owns its buffer."""

    def __init__(self, plan: StagingPlan) -> None:
        self._plan = plan
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._spare = memoryview(bytearray(1))
        self._kinds: dict[bytes, _Kind] = {}
        library = usable()
        self._reader = BatchReader(library, self._buffer) if library else None
        self.checked = 0
        """Images looked at."""

    def stage(self, batch: Batch) -> None:
        pending = _Pending()
        read, position = self._read_together(batch, pending)
        cold = False
        give_back, folder = self._plan.give_back, batch.folder
        for at, name in enumerate(batch.names):
            if read[at]:
                continue
            path = folder + name
            try:
                fd = open_regular(path)
            except NotRegular:
                self._plan.problems.add(FileProblem(path, "unstable", "it was a file when it was listed"))
                continue
            except OSError as unreadable:
                self._plan.problems.add(FileProblem.from_error(path, unreadable))
                continue
            try:
                if not cold and at % 16 == 0:
                    cold = self._look_ahead(fd, batch, at)
                size = batch.sizes[at]
                if size <= BATCH_BYTES:
                    position += self._small(fd, path, batch.first + at, size, position, pending)
                else:
                    self._large(fd, path, batch.first + at)
                if give_back:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except Unstable:
                self._plan.problems.add(FileProblem(path, "unstable", "it kept changing while it was read"))
            except OSError as unreadable:
                self._plan.problems.add(FileProblem.from_error(path, unreadable))
            finally:
                os.close(fd)
        self._write(pending)

    def _read_together(self, batch: Batch, pending: _Pending) -> tuple[bytearray, int]:
        """Read what holds still in one call. Which files these are, and how much of the buffer they take."""
        if self._reader is None or batch.sizes[0] > BATCH_BYTES:
            return bytearray(len(batch.names)), 0
        read = self._reader.read(batch.folder, batch.names, batch.sizes, self._plan.give_back)
        position = 0
        for at, size in enumerate(batch.sizes):
            if read[at]:
                content = self._buffer[position : position + size]
                self._take(batch.folder + batch.names[at], batch.first + at, content, -1, pending)
                self._plan.recent[batch.first + at] = read[at] == CHANGED_JUST_BEFORE
                position += size
        return read, position

    def _look_ahead(self, fd: int, batch: Batch, at: int) -> bool:
        """Fetch the next files ahead if this one has to come from the disk; whether it had to."""
        cold = is_cold(fd, self._spare)
        if cold:
            read_ahead([batch.folder + later for later in batch.names[at : at + READ_AHEAD_FILES]])
        return cold

    def _small(self, fd: int, path: bytes, number: int, size: int, position: int, pending: _Pending) -> int:
        """Read one file, behind the others in the buffer unless it is tiny; how much of the buffer it took."""
        for _attempt in range(ATTEMPTS):
            before = os.fstat(fd)
            content = self._read_one(fd, size, position)
            if content is None:
                self._write(pending)  # a large file passes through the buffer where these still lie
                pending.clear()
                self._large(fd, path, number)
                return 0
            if appearance(os.stat(path)) == appearance(before):
                self._plan.recent[number] = is_recent(before)
                compressed = self._take(path, number, content, fd, pending)
                return 0 if compressed or isinstance(content, bytes) else len(content)
        raise Unstable

    def _read_one(self, fd: int, size: int, position: int) -> bytes | memoryview | None:
        """A file of about ``size`` bytes, in the buffer from ``position`` unless it is tiny; None if it is large."""
        # One byte more than expected is asked for, so that growth shows without asking for the size.
        if size <= TINY_BYTES and len(tiny := os.pread(fd, size + 1, 0)) == size:
            return tiny
        got = os.preadv(fd, [self._buffer[position : position + size + 1]], 0)
        if got != size:
            got = read_small(fd, self._buffer[position:])
        return self._buffer[position : position + got] if got >= 0 else None

    def look_again(self, batch: Batch) -> None:
        """Files that were changed just before they were read: is what was staged what they hold now?

        Where it is not, or can't be told, the disk has the truth.
        """
        rows = self._plan.rows
        for at in np.flatnonzero(self._plan.recent[batch.first : batch.first + len(batch.names)]).tolist():
            number, path = batch.first + at, batch.folder + batch.names[at]
            if rows.form[number] == ABSENT:
                continue
            try:
                size = int(rows.size[number])
                now = checksum_on_disk(path, size, self._buffer, give_back=self._plan.give_back)
                same = now == rows.checksum[number]
            except (OSError, Unstable):
                same = False
            if not same:
                rows.form[number] = ABSENT
                self._plan.problems.add(FileProblem(path, "unstable", "it was changed while it was staged"))

    def _take(self, path: bytes, number: int, content: bytes | memoryview, fd: int, pending: _Pending) -> bool:
        """Check, compress and hash one whole file; was it compressed?"""
        kind = self._kinds.get(path[path.rfind(b".") :]) or self._kind(path)
        if kind.image_format is not None:
            self._check(path, content, True, fd, kind.image_format)
        piece = _smaller(kind.codec, content)
        compressed = piece is not content
        pending.numbers.append(number)
        pending.pieces.append(piece)
        pending.keys.append(xxhash.xxh3_128_digest(path))
        pending.sizes.append(len(content))
        pending.checksums.append(xxhash.xxh3_64_intdigest(content))
        pending.forms.append(kind.codec.number if compressed else 0)
        return compressed

    def _write(self, pending: _Pending) -> None:
        if not pending.pieces:
            return
        start = self._plan.slab.append(pending.pieces)
        stored = np.fromiter(map(len, pending.pieces), np.uint64, len(pending.pieces))
        keys = np.frombuffer(b"".join(pending.keys), np.uint64).reshape(-1, 2)
        columns, numbers = self._plan.rows.columns, np.array(pending.numbers)
        columns["key_low"][numbers], columns["key_high"][numbers] = keys[:, 0], keys[:, 1]
        columns["offset"][numbers] = start + np.cumsum(stored) - stored
        columns["stored"][numbers] = stored
        columns["size"][numbers] = pending.sizes
        columns["checksum"][numbers] = np.array(pending.checksums, np.uint64)
        columns["form"][numbers] = pending.forms

    def _kind(self, path: bytes) -> _Kind:
        extension = extension_of(path)
        formats = image_formats() if self._plan.verify != "none" else {}
        kind = _Kind(self._plan.choice.for_extension(extension), formats.get(extension))
        self._kinds[path[path.rfind(b".") :]] = kind
        return kind

    def _large(self, fd: int, path: bytes, number: int) -> None:
        """Stream one file into the slab; Unstable, and nothing recorded, where it does not hold still."""
        kind = self._kind(path)
        for attempt in range(ATTEMPTS):
            before = os.fstat(fd)
            try:
                if kind.image_format is not None and not attempt:
                    head, whole = self._chunk(fd, 0, before.st_size), before.st_size <= CHUNK_BYTES
                    self._check(path, head, whole, fd, kind.image_format)
                copied = self._copy(fd, before.st_size, kind.codec)
            except Unstable:
                continue
            if appearance(before) == appearance(os.stat(path)):
                self._plan.recent[number] = is_recent(before)
                self._record(path, number, before.st_size, copied)
                return
        raise Unstable

    def _copy(self, fd: int, size: int, codec: Codec) -> _Copied:
        if codec.name == "raw":
            offset, checksum = self._copy_raw(fd, size)
            return _Copied(offset, size, checksum, 0)
        chunks, checksum = self._copy_chunks(fd, size, codec)
        table = chunks.tobytes()
        return _Copied(self._plan.slab.append([table]), len(table), checksum, codec.number | CHUNKED)

    def _copy_raw(self, fd: int, size: int) -> tuple[int, int]:
        start, done, digest = self._plan.slab.claim(size), 0, xxhash.xxh3_64()
        while done < size:
            chunk = self._chunk(fd, done, size)
            digest.update(chunk)
            self._plan.slab.write(start + done, chunk)
            done += len(chunk)
        return start, digest.intdigest()

    def _copy_chunks(self, fd: int, size: int, codec: Codec) -> tuple[np.ndarray, int]:
        table, digest = np.zeros(-(-size // CHUNK_BYTES), CHUNK_ENTRY), xxhash.xxh3_64()
        for at in range(len(table)):
            chunk = self._chunk(fd, at * CHUNK_BYTES, size)
            digest.update(chunk)
            piece = _smaller(codec, chunk)
            table[at] = (self._plan.slab.append([piece]), len(piece))
        return table, digest.intdigest()

    def _chunk(self, fd: int, done: int, size: int) -> memoryview:
        """The next bytes of a file of ``size``, as much as a chunk; Unstable where it ends early."""
        wanted, got = min(CHUNK_BYTES, size - done), 0
        while got < wanted:
            more = os.preadv(fd, [self._buffer[got:wanted]], done + got)
            if more == 0:
                raise Unstable
            got += more
        return self._buffer[:got]

    def _check(self, path: bytes, head: bytes | memoryview, whole: bool, fd: int, expected: str) -> None:
        self.checked += 1
        if not head:
            self._plan.problems.add(FileProblem(path, "empty image"))
            return
        fine, why = check_image(head, whole, fd, expected, self._plan.verify)
        if not fine:
            opens = self._plan.verify == "header" or not check_image(head, whole, fd, expected, "header")[0]
            self._plan.problems.add(FileProblem(path, "image does not open" if opens else "image does not decode", why))

    def _record(self, path: bytes, number: int, size: int, copied: _Copied) -> None:
        rows = self._plan.rows
        rows.key_low[number], rows.key_high[number] = halves(path)
        rows.offset[number], rows.stored[number] = copied.offset, copied.stored
        rows.size[number], rows.checksum[number] = size, copied.checksum
        rows.form[number] = copied.form


def _smaller(codec: Codec, content: Piece) -> Piece:
    """The compressed bytes, or ``content`` itself where they are not smaller."""
    if codec.name == "raw" or not content:
        return content
    packed = codec.compress(content)
    return packed if len(packed) < len(content) else content
