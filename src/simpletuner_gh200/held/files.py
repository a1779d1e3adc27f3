"""Files of a data set in memory: views without copies, checked on first use, never what someone has written over since.

What is not there (yet) is read from disk by whoever asks. Each rank looks at the segments that its node's leader has
published; see ``shelf``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import xxhash

from simpletuner_gh200.held.codecs import CHUNK_BYTES, CHUNKED, NAMES, Codec, codec
from simpletuner_gh200.held.listing import is_bookkeeping
from simpletuner_gh200.held.segment import Segment, key_of
from simpletuner_gh200.held.shelf import Board, Shelf
from simpletuner_gh200.memory.mapping import SIZE_SEALS, create_memfd, map_shared
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.telemetry.redact import printable

logger = logging.getLogger("simpletuner_gh200")

CHUNK_ENTRY = np.dtype([("offset", "<u8"), ("stored", "<u8")])
"""Of a file that is held CHUNKED: where each piece of it lies."""

HASHED_AT_ONCE = 4 << 20

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class FileSegment(Segment):
    """Files as they were when they were staged; the maker's text has the other paths of their folders."""

    def __init__(self, fd: int, name: str, slab: Slab | None) -> None:
        super().__init__(fd, name, slab)
        assert slab is not None
        self.data = memoryview(slab.array).toreadonly()
        # Indexing a memoryview is several times faster than indexing an array, and gives plain ints.
        self.offset, self.length, self.size_of, self.checksum, self.form = (
            memoryview(self.rows[column]) for column in ("offset", "length", "size", "checksum", "form")
        )
        self.trusted = bytearray(len(self))
        """Of this process: stored as it is, and found intact."""
        self.aliases = [(os.fsencode(other), os.fsencode(staged)) for other, staged in json.loads(self.made_by)]

    def content(self, row: int) -> memoryview | None:
        """Decoded, and verified unless it is trusted; None where it does not match its checksum."""
        if self.trusted[row]:
            return self._decoded(row)
        try:
            content = self._decoded(row)
        except Exception:  # noqa: BLE001 - whatever a decoder says of damaged bytes, the answer is the disk
            return None
        if len(content) != self.size_of[row] or checksum(content) != self.checksum[row]:
            return None
        self.trusted[row] = self.form[row] == 0
        return content

    def _decoded(self, row: int) -> memoryview:
        form, start, size = self.form[row], self.offset[row], self.size_of[row]
        stored = self.data[start : start + self.length[row]]
        if form == 0:
            return stored
        used = _codec(form & ~CHUNKED)
        if form & CHUNKED:
            return memoryview(self._joined(np.frombuffer(stored, CHUNK_ENTRY), used, size))
        return memoryview(used.decompress(stored, size)).toreadonly()

    def _joined(self, table: np.ndarray, used: Codec, size: int) -> bytes:
        parts = []
        for at, (offset, stored) in enumerate(table.tolist()):
            wanted = min(CHUNK_BYTES, size - at * CHUNK_BYTES)
            piece = self.data[offset : offset + stored]
            parts.append(piece if stored == wanted else used.decompress(piece, wanted))
        return b"".join(parts)


def checksum(content: memoryview) -> int:
    """XXH3 of the bytes; in pieces where they are many, since the library keeps the GIL and training must not wait."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(content), HASHED_AT_ONCE):
        digest.update(content[start : start + HASHED_AT_ONCE])
    return int(digest.intdigest())


@lru_cache(maxsize=8)
def _codec(number: int) -> Codec:
    return codec(NAMES[number])


class Forgotten:
    """Which files were written since they were staged, or are damaged: the disk has the truth, for every rank.

    A byte for the hash of each path, in memory that the ranks share, so that it needs no lock and knows of files before
    they are staged. Where two paths have one byte, both are read from disk.
    """

    BYTES = 1 << 20

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        """The first says whether there is any; nearly always there is none."""

    @classmethod
    def alone(cls) -> Forgotten:
        """Of a process by itself."""
        fd = create_memfd("forgotten", cls.BYTES, SIZE_SEALS)
        mapped = map_shared(fd)
        os.close(fd)
        assert mapped is not None
        return cls(memoryview(mapped))

    def add(self, key: bytes) -> None:
        self._bytes[self._place(key)] = 1
        self._bytes[0] = 1

    def __contains__(self, key: bytes) -> bool:
        return bool(self._bytes[0] and self._bytes[self._place(key)])

    def __bool__(self) -> bool:
        return bool(self._bytes[0])

    def _place(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % (self.BYTES - 1) + 1


@dataclass
class ReadCounts:
    """Of this process. Threads may lose a count to each other; it is for people, not for decisions."""

    served: int = 0
    elsewhere: int = 0
    """Not staged, or stale: read from disk."""
    mismatches: int = 0


class HeldFiles:
    """Made in every rank over the same board. Safe in threads, and in forked children, which share all of it."""

    def __init__(
        self, board: Board, rank: int, forgotten: Forgotten, wanted: Callable[[], None] = lambda: None
    ) -> None:
        """``wanted`` is called when a file is read that is not there: somebody has use for it."""
        self.board = board
        self._shelf = Shelf(board, rank=rank, attach=FileSegment.in_memory)
        self._get = cast("Callable[[bytes], tuple[FileSegment, int] | None]", self._shelf.get)
        self._forgotten = forgotten
        self._wanted = wanted
        self.counts = ReadCounts()

    @classmethod
    def alone(cls, *segments: Segment) -> HeldFiles:
        """Of a process by itself."""
        made = cls(Board.create(), 0, Forgotten.alone())
        for segment in segments:
            made.publish(segment)
        return made

    def publish(self, segment: Segment) -> None:
        """From now on every rank of the node finds what is in it."""
        self._shelf.publish(segment)

    @property
    def count(self) -> int:
        self._shelf.refresh()
        return len(self._shelf)

    @property
    def held_bytes(self) -> int:
        return sum(segment.size for segment in self._shelf.segments)

    def view(self, path: FilePath) -> memoryview | None:
        """The file's bytes, read-only, or None where the disk has to be asked."""
        if type(path) is str and not self._forgotten:  # nearly every read: by name, intact, nothing written since
            found = self._get(key_of(path))
            if found is not None:
                segment, row = found
                if segment.trusted[row]:
                    self.counts.served += 1
                    start = segment.offset[row]
                    return segment.data[start : start + segment.length[row]]
        return self._view_with_care(path)

    def _view_with_care(self, path: FilePath) -> memoryview | None:
        found = self._find(path)
        if found is None:
            self.counts.elsewhere += 1
            if not is_bookkeeping(os.path.basename(os.fsencode(path))):
                self._wanted()
            return None
        segment, row = found
        content = segment.content(row)
        if content is None:
            self.counts.mismatches += 1
            self.counts.elsewhere += 1
            self.forget(path)
            logger.warning("gh200: %s is damaged in memory; reading it from disk", printable(os.fsencode(path)))
            return None
        self.counts.served += 1
        return content

    def holds(self, path: FilePath) -> bool:
        """Would ``view`` find it?"""
        return self._find(path) is not None

    def forget(self, path: FilePath) -> None:
        """Whoever reads it from now on, in any rank, reads the disk. Call it before changing the file."""
        for key in self._keys(path):
            self._forgotten.add(key)

    def summary(self) -> dict[str, Any]:
        return {"files": self.count, "held_bytes": self.held_bytes, **asdict(self.counts)}

    def _find(self, path: FilePath) -> tuple[FileSegment, int] | None:
        self._shelf.refresh()
        for key in self._keys(path):
            found = self._get(key)
            if found is not None:
                return None if key in self._forgotten else found
        return None

    def _keys(self, path: FilePath) -> Iterator[bytes]:
        """Of every path by which it may be held: it may be untidy, or go through another link to the same folder."""
        text = os.fspath(path)
        given = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        yield key_of(given)
        tidy = os.fsencode(os.path.abspath(text))
        if tidy != given:
            yield key_of(tidy)
        for segment in cast(list[FileSegment], self._shelf.segments):
            for other, staged in segment.aliases:
                if tidy.startswith(other):
                    yield key_of(staged + tidy[len(other) :])
