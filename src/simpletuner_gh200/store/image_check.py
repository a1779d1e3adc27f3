"""Does an image open, does it decode: asked of Pillow while the file is staged and its bytes are at hand."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

Verify = Literal["header", "decode", "none"]

DECODED_BYTES = 160_000_000
"""What all threads together may hold of decoded images at a time; staging may use 256 MiB besides what it keeps."""

PIXEL_BYTES = 4
"""As Pillow holds colour, whatever the file."""

DECODE_PIXELS = DECODED_BYTES // PIXEL_BYTES
"""Larger images are opened but not decoded."""

HEAD_BYTES = 16 << 10

NOT_PICTURES = frozenset({"MPEG", "BUFR", "GRIB", "HDF5", "WMF", "EPS"})
"""Formats that Pillow knows only in part, or only with another program: its refusal says nothing about the file."""


class Room:
    """So many bytes to share; whoever would go over waits. A single request must not be larger than all of it."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


_decoding = Room(DECODED_BYTES)


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
        fine, why = _examine(io.BytesIO(head[:HEAD_BYTES]), expected, "header")
        if fine or (whole and len(head) <= HEAD_BYTES):
            return fine, why
    if whole:
        return _examine(io.BytesIO(head), expected, verify)
    # Some formats keep what is needed at the end of the file: ask again with all of it.
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return _examine(file, expected, verify)


def _open(source: io.IOBase, expected: str) -> Any:
    """Asking one plug-in takes half the time of asking all of them in turn."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(source, formats=(expected,))
    except UnidentifiedImageError:
        source.seek(0)
        return Image.open(source)


def _examine(source: io.IOBase, expected: str, verify: Verify) -> tuple[bool, str]:
    from PIL import Image, UnidentifiedImageError

    try:
        with _open(source, expected) as image:
            width, height = image.size
            if verify == "decode" and width * height <= DECODE_PIXELS:
                with _decoding.take(width * height * PIXEL_BYTES):
                    image.load()
                    image.close()
    except Image.DecompressionBombError:
        return True, ""  # it opens; that it is very large is for SimpleTuner to judge
    except UnidentifiedImageError:
        return False, "no decoder knows it"  # Pillow's own text names the address of the buffer
    except Exception as broken:  # noqa: BLE001 - decoders raise whatever they like on damaged data
        return False, f"{type(broken).__name__}: {broken}"[:200]
    return True, ""
