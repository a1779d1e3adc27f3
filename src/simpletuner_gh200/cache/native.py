"""``tensor_files.c`` as a library: what is done with many files, keys or rows at once, and every store to an index.

Wheels have it built; else it is compiled on first use. There is no second way in Python: slots are read by other
processes without a lock, and Python has no barriers for processors that reorder stores, of which Grace is one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource

SOURCE = CSource(
    Path(__file__).with_name("tensor_files.c"),
    "cache_config",
    "install a wheel, which has it built; caches set to 'standard' do without",
)


@cache
def library() -> ctypes.CDLL:
    """Raises FeatureUnavailable where this machine can't build or load it."""
    try:
        return _with_types(ctypes.CDLL(str(SOURCE.library())))
    except (OSError, AttributeError) as broken:
        raise FeatureUnavailable(f"{SOURCE.wanted_by} can't load its library: {broken}") from broken


def _with_types(library: ctypes.CDLL) -> ctypes.CDLL:
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    library.gh200_take_files.argtypes = (
        *(ctypes.c_char_p, number, pointer, size, pointer, size),
        *(pointer, ctypes.c_uint64, number, pointer, pointer),
    )
    library.gh200_put_payloads.argtypes = (
        *(pointer, pointer, pointer, pointer, pointer, number),
        *(number, pointer),
    )
    library.gh200_list_tensors.argtypes = (
        *(number, ctypes.c_char_p, pointer, size),
        *(pointer, pointer, pointer),
    )
    library.gh200_file_sizes.restype = None
    library.gh200_file_sizes.argtypes = (number, ctypes.c_char_p, number, pointer)
    library.gh200_look_at.restype = library.gh200_find_slots.restype = library.gh200_write_slot.restype = None
    library.gh200_look_at.argtypes = (ctypes.c_char_p, number, pointer)
    library.gh200_find_slots.argtypes = (pointer, ctypes.c_uint64, pointer, number, pointer)
    library.gh200_write_slot.argtypes = (pointer, ctypes.c_uint64, pointer)
    library.gh200_enter_slots.argtypes = (pointer, ctypes.c_uint64, pointer, number, ctypes.c_uint64, pointer)
    library.gh200_copy_rows.restype, library.gh200_copy_rows.argtypes = None, (pointer, pointer, number, size, size)
    library.gh200_crc32.argtypes, library.gh200_crc32.restype = (ctypes.c_char_p, size), ctypes.c_uint32
    library.gh200_inflate.argtypes = (ctypes.c_char_p, size, pointer, size)
    library.gh200_inflate.restype = ctypes.c_int64
    return library
