"""``bulk.c`` as Python calls it: many files or rows at a time, without the interpreter lock.

Wheels have it built; else it is compiled on first use. Caches need it. Data sets do without where it can't be built:
each file is then read by itself, which takes longer.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource

logger = logging.getLogger("simpletuner_gh200")

SOURCE = CSource(
    Path(__file__).with_name("bulk.c"),
    "cache_config",
    "install a wheel, which has it built; caches set to 'standard' do without",
)

ENTRIES_BYTES = 64 << 10
_SHORTEST_ENTRY = 24
"""Of a directory, in bytes: bounds how many fit."""

NO_FILE = (1 << 64) - 1
"""Size of what is no plain file."""

TAKEN, UNKNOWN, OTHER, DAMAGED, GONE, CHANGED, NO_ROOM, REFUSED = range(8)
"""What became of a file. Only what is TAKEN lies in the buffer to stay."""

_LOOK = [(name, np.uint64) for name in ("plain", "size", "mtime_ns", "ctime_ns", "inode")]
LOOK = np.dtype(_LOOK)
"""How a file looks; all zero where there is none."""
FILE_FIELDS = [("status", np.uint64), *_LOOK, ("content", np.uint64), ("content_size", np.uint64)]
FILE = np.dtype(FILE_FIELDS)
"""A file that was read: how it looked, and where it lies in the buffer."""


class _Isal(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("inflate_init", "inflate", "crc32"))


_ISAL_NAMES = ("isal_inflate_init", "isal_inflate_stateless", "crc32_gzip_refl")


@cache
def library() -> ctypes.CDLL:
    """Raises FeatureUnavailable where this machine can't build or load it."""
    try:
        return _with_types(ctypes.CDLL(str(SOURCE.library())))
    except (OSError, AttributeError) as broken:
        raise FeatureUnavailable(f"{SOURCE.wanted_by} can't load its library: {broken}") from broken


@cache
def inflating_library() -> ctypes.CDLL:
    """The same with ISA-L, which inflates and knows the checksums of torch's files; FeatureUnavailable without it.

    Python's isal package has it in its extension module. Its functions are called without Python in between.
    """
    found = library()
    try:
        from isal import igzip_lib

        isal = ctypes.CDLL(igzip_lib.__file__)
        addresses = [ctypes.cast(isal[name], ctypes.c_void_p).value for name in _ISAL_NAMES]
    except (ImportError, OSError, AttributeError) as missing:
        raise FeatureUnavailable(
            f"{SOURCE.wanted_by} needs the Python package 'isal' with ISA-L in it: {missing}",
            remedy="pip install 'isal>=1.7,<2'; caches set to 'standard' do without",
        ) from missing
    found.gh200_use_isal(ctypes.byref(_Isal(*addresses)))
    return found


@cache
def library_if_any() -> ctypes.CDLL | None:
    """The library, or None, once said why, for those that can do without."""
    try:
        return library()
    except FeatureUnavailable as reason:
        logger.info("gh200: files are read one by one, more slowly: %s", reason)
        return None


def _with_types(library: ctypes.CDLL) -> ctypes.CDLL:
    size, pointer, number, names = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    types = {
        "list_folder": (number, names, number, pointer, size, pointer, pointer, pointer),
        "look_at": (number, names, number, pointer),
        "read_files": (names, names, number, pointer, size, number, pointer),
        "use_isal": (pointer,),
        "take_files": (
            *(names, number, pointer, size, pointer, size),
            *(pointer, ctypes.c_uint64, number, pointer, pointer),
        ),
        "put_payloads": (pointer, pointer, pointer, pointer, pointer, number, number, pointer),
        "copy_rows": (pointer, pointer, number, size, size),
    }
    for name, arguments in types.items():
        getattr(library, f"gh200_{name}").argtypes = arguments
    return library


class FolderLister:
    """Lists open folders, some entries at a time. For one thread: it owns its buffers."""

    def __init__(self, library: ctypes.CDLL, suffix: bytes, *, measure: bool) -> None:
        """Plain files that don't end with ``suffix`` are left out; sizes are 0 unless they are to be measured."""
        self._list, self._suffix, self._measure = library.gh200_list_folder, suffix, measure
        self._scratch = ctypes.create_string_buffer(ENTRIES_BYTES)
        self._names = ctypes.create_string_buffer(ENTRIES_BYTES)
        self._used = ctypes.c_size_t()
        self._sizes = np.zeros(ENTRIES_BYTES // _SHORTEST_ENTRY, np.uint64)

    def next(self, folder: int) -> tuple[list[bytes], np.ndarray]:
        """Names and sizes, ``NO_FILE`` for what is no plain file; nothing at the end."""
        count = self._list(
            *(folder, self._suffix, self._measure, self._scratch, ENTRIES_BYTES),
            *(self._names, ctypes.byref(self._used), self._sizes.ctypes.data),
        )
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        if not count:
            return [], self._sizes[:0]
        return ctypes.string_at(self._names, self._used.value - 1).split(b"\0"), self._sizes[:count].copy()


class FileReader:
    """Reads files of a folder into one buffer. For one thread: it owns its rows, the buffer is its caller's."""

    def __init__(self, library: ctypes.CDLL, buffer: memoryview, most: int) -> None:
        self._read, self._buffer = library.gh200_read_files, np.frombuffer(buffer, np.uint8)
        self._files = np.zeros(most, FILE)

    def read(self, folder: bytes, names: Sequence[bytes], *, give_back: bool) -> np.ndarray:
        """A row for each, good until the next call; ``give_back`` drops the page cache of what was read."""
        files = self._files[: len(names)]
        self._read(
            *(folder, b"\0".join(names), len(names), self._buffer.ctypes.data, self._buffer.nbytes),
            *(give_back, files.ctypes.data),
        )
        return files


def look_at(names: Sequence[bytes], folder: int | None = None) -> np.ndarray:
    """How files look now, by paths or by names in an open folder: a row each."""
    looks = np.zeros(len(names), LOOK)
    library().gh200_look_at(_AT_FDCWD if folder is None else folder, b"\0".join(names), len(names), looks.ctypes.data)
    return looks


_AT_FDCWD = -100
