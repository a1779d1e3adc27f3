"""Codecs of what is held, and which for which files: decided from a few samples per extension.

Each library releases the GIL while it works; a missing one is an error with the remedy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.held.listing import ExtensionTotals, Listing
from simpletuner_gh200.memory.regular_files import open_regular

CodecName = Literal["raw", "lz4", "zlib", "snappy", "zstd"]
Buffer = bytes | bytearray | memoryview

NAMES: tuple[CodecName, ...] = ("raw", "lz4", "zlib", "snappy", "zstd")
"""By the number that rows have."""
CHUNKED = 0x40
"""Added to the number of a codec: what is stored is a table of where each piece of the file lies."""

PACKAGES: dict[CodecName, str] = {"lz4": "lz4", "snappy": "cramjam", "zstd": "zstandard"}
"""What has to be installed for each; ISA-L, for zlib, always is."""

CHUNK_BYTES = 512 << 10
"""Larger files are compressed in pieces of this size, so that memory stays bounded and no block nears a limit."""

WORTHWHILE = 1.10
"""``auto`` compresses from this ratio on: below, decompressing costs more than the memory is worth."""

SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class Codec:
    """``compress`` and ``decompress`` one piece; ``decompress`` is told the size it must come out at."""

    name: CodecName
    compress: Callable[[Buffer], Buffer]
    decompress: Callable[[Buffer, int], Buffer]

    @property
    def number(self) -> int:
        return NAMES.index(self.name)


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
    """ISA-L's, which is many times faster than the standard library's and makes the same format."""
    zlib = _load("isal.isal_zlib", "zlib")
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


_MAKERS = dict(zip(NAMES, (_raw, _lz4, _zlib, _snappy, _zstd), strict=True))


# -- choosing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecChoice:
    """Codec by extension; ``reasons`` says why, for the log."""

    by_extension: dict[str, Codec]
    default: Codec
    reasons: dict[str, str]

    def for_extension(self, extension: str) -> Codec:
        return self.by_extension.get(extension, self.default)

    @property
    def compresses(self) -> bool:
        return any(one.name != "raw" for one in (self.default, *self.by_extension.values()))


def choose(compression: str | None, listing: Listing) -> CodecChoice:
    """What ``in_memory.compression`` asks for; ``auto`` probes with lz4."""
    raw = codec("raw")
    if compression is None:
        return CodecChoice({}, raw, {})
    if compression != "auto":
        return CodecChoice({}, codec(compression), {})  # type: ignore[arg-type]
    lz4 = codec("lz4")
    ratios = {ending: probe(totals, lz4) for ending, totals in listing.extensions.items()}
    chosen = {ending: lz4 if ratio >= WORTHWHILE else raw for ending, ratio in ratios.items()}
    reasons = {ending: f"{chosen[ending].name}: lz4 gives {ratio:.2f}" for ending, ratio in ratios.items()}
    return CodecChoice(chosen, raw, reasons)


def probe(totals: ExtensionTotals, candidate: Codec) -> float:
    """Raw over compressed size of the samples' middle parts; 1.0 where nothing could be read."""
    raw = packed = 0
    for path, size in totals.samples:
        piece = _middle(path, size)
        raw += len(piece)
        packed += min(len(candidate.compress(piece)), len(piece)) if piece else 0
    return raw / packed if packed else 1.0


def estimate(listing: Listing, candidate: Codec) -> int:
    """Bytes the whole listing would take with one codec."""
    return round(sum(totals.size / probe(totals, candidate) for totals in listing.extensions.values()))


def estimates(listing: Listing, names: tuple[CodecName, ...]) -> dict[str, int]:
    """Bytes the listing would take with each of these codecs that is installed."""
    found: dict[str, int] = {}
    for name in names:
        try:
            found[name] = estimate(listing, codec(name))
        except FeatureUnavailable:
            continue
    return found


def _middle(path: bytes, size: int) -> bytes:
    try:
        fd = open_regular(path)
    except OSError:
        return b""
    try:
        return os.pread(fd, SAMPLE_BYTES, max(size // 2 - SAMPLE_BYTES // 2, 0))
    except OSError:
        return b""
    finally:
        os.close(fd)
