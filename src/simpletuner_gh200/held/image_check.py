"""Does an image open, does it decode: asked of Pillow while the file is staged and its bytes are at hand."""

from __future__ import annotations

import ctypes
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import IO, Any, Literal

Verify = Literal["header", "decode", "none"]

CHECKING_BYTES = 160_000_000
"""What all threads together may hold of images that they check; staging may use 256 MiB besides what it keeps."""

PIXEL_BYTES = 10
"""Four as Pillow holds colour, and what a decoder keeps besides: a progressive JPEG all of its coefficients."""

DECODE_PIXELS = CHECKING_BYTES // PIXEL_BYTES
"""Larger images are opened but not decoded."""

HEAD_BYTES = 16 << 10

NOT_PICTURES = frozenset({"MPEG", "BUFR", "GRIB", "HDF5", "WMF", "EPS"})
"""Formats that Pillow knows only in part, or only with another program: its refusal says nothing about the file."""


class CheckingRoom:
    """So many bytes to share; whoever would go over waits, and whoever wants more than all of it has it alone."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int, after: Callable[[], None] = lambda: None) -> Iterator[None]:
        """``after`` runs before what was taken is given back, where that is a good part of it."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            if size >= self._size // 16:
                after()
            with self._changed:
                self._free += size
                self._changed.notify_all()


_checking = CheckingRoom(CHECKING_BYTES)


def _room_for(size: int, pixels: int = 0) -> AbstractContextManager[None]:
    """``size`` is counted twice: plug-ins that read all of a file hand a copy of it to their decoder."""
    needed = 2 * size + pixels * PIXEL_BYTES
    return _checking.take(needed, _trim) if needed > 2 * HEAD_BYTES else nullcontext()


def _trim() -> None:
    """The C library keeps what a thread freed for that thread: with many of them that is memory of its own."""
    with suppress(AttributeError):  # another C library, which has its own ways
        ctypes.CDLL(None).malloc_trim(0)


@lru_cache(maxsize=1)
def image_formats() -> dict[str, str]:
    """What Pillow can open here, plug-ins included: its name for the format of each extension."""
    from PIL import Image

    known = Image.registered_extensions()  # which loads the plug-ins that OPEN then lists
    kinds = Image.OPEN.keys() - NOT_PICTURES
    return {ending.lstrip("."): kind for ending, kind in known.items() if kind in kinds}


def check_image(head: bytes | memoryview, whole: bool, fd: int, expected: str, verify: Verify) -> tuple[bool, str]:
    """(fine, why not) for an image whose first bytes are ``head``; ``fd`` is read where these are not all of it.

    It may be of any format that Pillow knows; the ``expected`` one is tried first.
    """
    if verify == "header":
        # Nearly every header is near the start; copying all of the file for Pillow would cost more than opening it.
        near = head[:HEAD_BYTES]
        fine, why = _examine(io.BytesIO(near), len(near), expected, "header")
        if fine or (whole and len(head) <= HEAD_BYTES):
            return fine, why
    if whole:
        return _examine(io.BytesIO(head), len(head), expected, verify)
    # Some formats keep what is needed at the end of the file, and some plug-ins read all of it to open it.
    with open(fd, "rb", closefd=False) as file:
        return _examine(file, os.fstat(fd).st_size, expected, verify)


def _open(source: IO[bytes], expected: str) -> Any:
    """Asking one plug-in takes half the time of asking all of them in turn."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(source, formats=(expected,))
    except UnidentifiedImageError:
        source.seek(0)
        return Image.open(source)


def _examine(source: IO[bytes], size: int, expected: str, verify: Verify) -> tuple[bool, str]:
    from PIL import Image, UnidentifiedImageError

    try:
        with _room_for(size), _open(source, expected) as image:
            pixels = image.size[0] * image.size[1]
        if verify == "decode" and pixels <= DECODE_PIXELS:
            source.seek(0)
            with _room_for(size, pixels), _open(source, expected) as image:
                image.load()
    except Image.DecompressionBombError:
        return True, ""  # it opens; that it is very large is for SimpleTuner to judge
    except UnidentifiedImageError:
        return False, "no decoder knows it"  # Pillow's own text names the address of the buffer
    except Exception as broken:  # noqa: BLE001 - decoders raise whatever they like on damaged data
        return False, f"{type(broken).__name__}: {broken}"[:200]
    return True, ""
