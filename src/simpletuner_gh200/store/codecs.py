"""Codecs of what is held. Each library releases the GIL while it works; a missing one is an error with the remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from simpletuner_gh200.errors import FeatureUnavailable

CodecName = Literal["raw", "lz4", "zlib", "snappy", "zstd"]
Buffer = bytes | bytearray | memoryview

NUMBERS: dict[CodecName, int] = {"raw": 0, "lz4": 1, "zlib": 2, "snappy": 3, "zstd": 4}
NAMES: dict[int, CodecName] = {number: name for name, number in NUMBERS.items()}

PACKAGES: dict[CodecName, str] = {"lz4": "lz4", "snappy": "cramjam", "zstd": "zstandard"}
"""What has to be installed for each; zlib is Python's own."""

CHUNK_BYTES = 512 << 10
"""Larger files are compressed in pieces of this size, so that memory stays bounded and no block nears a limit."""


@dataclass(frozen=True)
class Codec:
    """``compress`` and ``decompress`` one piece; ``decompress`` is told the size it must come out at."""

    name: CodecName
    compress: Callable[[Buffer], Buffer]
    decompress: Callable[[Buffer, int], Buffer]

    @property
    def number(self) -> int:
        return NUMBERS[self.name]


def codec(name: CodecName) -> Codec:
    """The codec of that name; FeatureUnavailable with the install hint where its library is missing."""
    return _MAKERS[name]()


def _load(module: str, codec_name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise FeatureUnavailable(
            f"compression {codec_name!r} needs the Python package {package!r}, which is not installed",
            remedy=f"pip install {package}, or pip install 'simpletuner-gh200[codecs]'",
        ) from missing


def _raw() -> Codec:
    return Codec("raw", lambda data: data, lambda data, _size: data)


def _lz4() -> Codec:
    block = _load("lz4.block", "lz4")
    return Codec(
        "lz4",
        lambda data: block.compress(data, store_size=False),
        lambda data, size: block.decompress(data, uncompressed_size=size) if size else b"",
    )


def _zlib() -> Codec:
    """isal where it is installed (the same format, many times faster), else the standard library."""
    try:
        zlib = import_module("isal.isal_zlib")
    except ImportError:
        zlib = import_module("zlib")
    return Codec(
        "zlib", lambda data: zlib.compress(data, 1), lambda data, size: zlib.decompress(data, bufsize=max(size, 1))
    )


def _snappy() -> Codec:
    snappy = _load("cramjam", "snappy").snappy

    def decompress(data: Buffer, size: int) -> Buffer:
        out = bytearray(size)
        written = snappy.decompress_raw_into(bytes(data), out)
        return out if written == size else out[:written]

    return Codec("snappy", lambda data: bytes(snappy.compress_raw(bytes(data))), decompress)


def _zstd() -> Codec:
    zstandard = _load("zstandard", "zstd")
    mine = threading.local()  # its contexts are not safe to share between threads

    def compress(data: Buffer) -> Buffer:
        if not hasattr(mine, "compressor"):
            mine.compressor = zstandard.ZstdCompressor(level=1)
        return mine.compressor.compress(data)  # type: ignore[no-any-return]

    def decompress(data: Buffer, size: int) -> Buffer:
        if not hasattr(mine, "decompressor"):
            mine.decompressor = zstandard.ZstdDecompressor()
        return mine.decompressor.decompress(data, max_output_size=size)  # type: ignore[no-any-return]

    return Codec("zstd", compress, decompress)


_MAKERS: dict[CodecName, Callable[[], Codec]] = {
    "raw": _raw,
    "lz4": _lz4,
    "zlib": _zlib,
    "snappy": _snappy,
    "zstd": _zstd,
}
