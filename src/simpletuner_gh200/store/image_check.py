"""Does an image open, does it decode: asked of Pillow while the file is staged and its bytes are at hand."""

from __future__ import annotations

import io
import os
import threading
from functools import lru_cache
from typing import Literal

Verify = Literal["header", "decode", "none"]

DECODE_PIXELS = 64_000_000
"""Larger images are opened but not decoded: that needs all pixels at once, beyond what staging may use."""

HEAD_BYTES = 16 << 10

NOT_PICTURES = frozenset({"MPEG", "BUFR", "GRIB", "HDF5", "WMF", "EPS"})
"""Formats that Pillow knows only in part, or only with another program: its refusal says nothing about the file."""

_one_large_decode = threading.Semaphore(1)
_LARGE_PIXELS = 4_000_000


@lru_cache(maxsize=1)
def image_extensions() -> frozenset[str]:
    """What Pillow can open here, plug-ins included."""
    from PIL import Image

    known = Image.registered_extensions()  # which loads the plug-ins that OPEN then lists
    kinds = Image.OPEN.keys() - NOT_PICTURES
    return frozenset(ending.lstrip(".") for ending, kind in known.items() if kind in kinds)


def check_image(head: bytes | memoryview, whole: bool, fd: int, verify: Verify) -> tuple[bool, str]:
    """(fine, why not) for an image whose first bytes are ``head``; ``fd`` is read where these are not all of it."""
    if verify == "header":
        # Nearly every header is near the start; copying all of the file for Pillow would cost more than opening it.
        fine, why = _examine(io.BytesIO(head[:HEAD_BYTES]), "header")
        if fine or (whole and len(head) <= HEAD_BYTES):
            return fine, why
    if whole:
        return _examine(io.BytesIO(head), verify)
    # Some formats keep what is needed at the end of the file: ask again with all of it.
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return _examine(file, verify)


def _examine(source: io.IOBase, verify: Verify) -> tuple[bool, str]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source) as image:
            width, height = image.size
            if verify == "decode" and width * height <= DECODE_PIXELS:
                _decode(image, width * height)
    except Image.DecompressionBombError:
        return True, ""  # it opens; that it is very large is for SimpleTuner to judge
    except UnidentifiedImageError:
        return False, "no decoder knows it"  # Pillow's own text names the address of the buffer
    except Exception as broken:  # noqa: BLE001 - decoders raise whatever they like on damaged data
        return False, f"{type(broken).__name__}: {broken}"[:200]
    return True, ""


def _decode(image: object, pixels: int) -> None:
    if pixels <= _LARGE_PIXELS:
        image.load()  # type: ignore[attr-defined]
        return
    with _one_large_decode:
        image.load()  # type: ignore[attr-defined]
