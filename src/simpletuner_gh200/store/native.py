"""``files.c`` as Python calls it: list a folder, read a batch of files, without the interpreter lock.

Where it can't be built, staging does the same with Python's own calls, more slowly; see ``usable``.
"""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from functools import lru_cache
from pathlib import Path

import numpy as np

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource

logger = logging.getLogger("simpletuner_gh200")

SOURCE = CSource(Path(__file__).with_name("files.c"), "fast staging", "go without: it only takes longer")

ENTRIES_BYTES = 64 << 10
_SHORTEST_ENTRY = 24
"""Of a directory, in bytes: bounds how many fit."""

OTHER = (1 << 64) - 1

CHANGED_JUST_BEFORE = 2
"""Mark of a file that was read, and whose times can't tell whether it held still meanwhile."""


@lru_cache(maxsize=1)
def usable() -> ctypes.CDLL | None:
    """The library, or None, once said why, where this machine can't build or load it."""
    try:
        return _with_types(ctypes.CDLL(str(SOURCE.library())))
    except (FeatureUnavailable, OSError, AttributeError) as reason:
        logger.info("gh200: staging goes on with Python's own file calls, more slowly: %s", reason)
        return None


def _with_types(library: ctypes.CDLL) -> ctypes.CDLL:
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.gh200_list_folder.argtypes = (ctypes.c_int, pointer, size, pointer, pointer, pointer)
    library.gh200_read_files.restype = None
    library.gh200_read_files.argtypes = (
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, pointer),
        *(pointer, size, ctypes.c_int, pointer),
    )
    return library


class FolderLister:
    """Lists open folders, some entries at a time. For one thread: it owns its buffers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._list = library.gh200_list_folder
        self._scratch = ctypes.create_string_buffer(ENTRIES_BYTES)
        self._names = ctypes.create_string_buffer(ENTRIES_BYTES)
        self._used = ctypes.c_size_t()
        self._sizes = np.zeros(ENTRIES_BYTES // _SHORTEST_ENTRY, np.uint64)

    def next(self, folder: int) -> tuple[list[bytes], np.ndarray]:
        """Names and sizes, ``OTHER`` for what is no plain file; nothing at the end."""
        count = self._list(
            *(folder, self._scratch, ENTRIES_BYTES),
            *(self._names, ctypes.byref(self._used), self._sizes.ctypes.data),
        )
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        if not count:
            return [], self._sizes[:0]
        return ctypes.string_at(self._names, self._used.value - 1).split(b"\0"), self._sizes[:count]


class BatchReader:
    """Reads batches of files into one buffer. For one thread: the buffer is its caller's."""

    def __init__(self, library: ctypes.CDLL, buffer: memoryview) -> None:
        self._read = library.gh200_read_files
        self._buffer = np.frombuffer(buffer, np.uint8)

    def read(self, folder: bytes, names: list[bytes], sizes: array[int], give_back: bool) -> bytearray:
        """For each file whether it lies in the buffer, behind the earlier ones that do: 0, 1, CHANGED_JUST_BEFORE."""
        done = bytearray(len(names))
        marks = (ctypes.c_ubyte * len(names)).from_buffer(done)
        sizes_at, _count = sizes.buffer_info()
        self._read(
            *(folder, b"\0".join(names), len(names), sizes_at),
            *(self._buffer.ctypes.data, self._buffer.nbytes, give_back, marks),
        )
        return done
