"""Serving a staged dataset: views without copies, checked on first use, never what someone has written over since."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from simpletuner_gh200.memory.mapping import map_readonly, map_shared
from simpletuner_gh200.store.codecs import CHUNK_BYTES, NAMES, Codec, codec
from simpletuner_gh200.store.index import ABSENT, CHUNK_ENTRY, CHUNKED, Index
from simpletuner_gh200.store.shared_memory import StagedMemory
from simpletuner_gh200.telemetry.printable import printable

logger = logging.getLogger("simpletuner_gh200")

STALE = 1
"""Written or deleted since it was staged: the disk has the truth."""

DAMAGED = 2
"""The memory no longer holds what was staged: the disk has the truth."""

HASHED_AT_ONCE = 4 << 20

FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@dataclass
class ReadCounts:
    """Of this process. Threads may lose a count to each other; it is for people, not for decisions."""

    served: int = 0
    elsewhere: int = 0
    """Not staged, or stale: read from disk."""
    mismatches: int = 0


class StagedDataset:
    """Made in every rank from the same memory. Safe in threads, and in forked children, which share all of it."""

    def __init__(self, memory: StagedMemory) -> None:
        self._index = Index(memory.index, memory.count)
        self._rows = self._index.rows
        self._look_up = self._index.find
        self._offset, self._size, self._form = self._rows.offset, self._rows.size, self._rows.form
        data, state = map_readonly(memory.data), map_shared(memory.state)
        self._data = memoryview(data) if data is not None else memoryview(b"")
        assert state is not None
        self._state = memoryview(state)
        self._trusted = bytearray(memory.count)
        """Of this process: stored as it is, and found intact."""
        self._aliases = memory.aliases
        self.counts = ReadCounts()

    @property
    def count(self) -> int:
        return self._rows.count

    @property
    def held_bytes(self) -> int:
        return len(self._data)

    def view(self, path: FilePath) -> memoryview | None:
        """The file's bytes, read-only, or None where the disk has to be asked."""
        if type(path) is str:  # nearly every read: asked for by name, intact, not written since
            row = self._look_up(path.encode("utf-8", "surrogateescape"))
            if row >= 0 and self._trusted[row] and not self._state[row]:
                self.counts.served += 1
                start = self._offset[row]
                return self._data[start : start + self._size[row]]
        return self._view_with_care(path)

    def _view_with_care(self, path: FilePath) -> memoryview | None:
        row = self._find(path)
        if row < 0 or self._state[row]:
            self.counts.elsewhere += 1
            return None
        content = self._decoded(row) if self._trusted[row] else self._content(row)
        if content is None:
            logger.warning("gh200: %s is damaged in memory; reading it from disk", printable(os.fsencode(path)))
        else:
            self.counts.served += 1
        return content

    def holds(self, path: FilePath) -> bool:
        """Would ``view`` find it?"""
        row = self._find(path)
        return row >= 0 and not self._state[row]

    def forget(self, path: FilePath) -> None:
        """Whoever reads it from now on, in any rank, reads the disk. Call it before changing the file."""
        row = self._find(path)
        if row >= 0:
            self._state[row] = STALE

    def summary(self) -> dict[str, Any]:
        return {"files": self.count, "held_bytes": self.held_bytes, **asdict(self.counts)}

    def row_size(self, row: int) -> int:
        return int(self._rows.size[row])

    def check_row(self, row: int) -> bool:
        """Is what is held in ``row`` what was staged? Marks it for every rank where it is not. For the scrub."""
        if self._rows.form[row] == ABSENT or self._state[row]:
            return True
        return self._content(row) is not None

    def _find(self, path: FilePath) -> int:
        text = os.fspath(path)
        key = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        row = self._look_up(key)
        if row < 0:
            row = self._find_otherwise(text, key)
        return row if row >= 0 and self._form[row] != ABSENT else -1

    def _find_otherwise(self, text: str | bytes, key: bytes) -> int:
        """The path may be relative or untidy, or go through another link to the same folder."""
        tidy = os.fsencode(os.path.abspath(text))
        row = self._look_up(tidy) if tidy != key else -1
        if row >= 0:
            return row
        for other, staged in self._aliases:
            if tidy.startswith(other):
                row = self._look_up(staged + tidy[len(other) :])
                if row >= 0:
                    return row
        return -1

    def _content(self, row: int) -> memoryview | None:
        """Decoded and verified; None, and marked for every rank, where it does not match its checksum."""
        rows = self._rows
        try:
            content = self._decoded(row)
        except Exception:  # noqa: BLE001 - whatever a decoder says of damaged bytes, the answer is the disk
            content = None
        if content is None or len(content) != rows.size[row] or checksum(content) != rows.checksum[row]:
            self._state[row] = DAMAGED
            self.counts.mismatches += 1
            return None
        if rows.form[row] == 0:
            self._trusted[row] = 1
        return content

    def _decoded(self, row: int) -> memoryview:
        rows = self._rows
        form, start, size = rows.form[row], rows.offset[row], rows.size[row]
        stored = self._data[start : start + rows.stored[row]]
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
            piece = self._data[offset : offset + stored]
            parts.append(piece if stored == wanted else used.decompress(piece, wanted))
        return b"".join(parts)


def checksum(content: memoryview) -> int:
    """XXH3 of the bytes; in pieces where they are many, since the library keeps the GIL and training must not wait."""
    if len(content) <= HASHED_AT_ONCE:
        return int(xxhash.xxh3_64_intdigest(content))
    digest = xxhash.xxh3_64()
    for start in range(0, len(content), HASHED_AT_ONCE):
        digest.update(content[start : start + HASHED_AT_ONCE])
    return int(digest.intdigest())


@lru_cache(maxsize=8)
def _codec(number: int) -> Codec:
    return codec(NAMES[number])
