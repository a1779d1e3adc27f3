"""Which codec for which files, and what a dataset would take with it: decided from a few samples per extension."""

from __future__ import annotations

import os
from dataclasses import dataclass

from simpletuner_gh200.store.codecs import Codec, codec
from simpletuner_gh200.store.discovery import ExtensionTotals, Listing

WORTHWHILE = 1.10
"""``auto`` compresses from this ratio on: below, decompressing costs more than the memory is worth."""

SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class Choice:
    """Codec by extension; ``reasons`` says why, for the log."""

    by_extension: dict[str, Codec]
    default: Codec
    reasons: dict[str, str]

    def for_extension(self, extension: str) -> Codec:
        return self.by_extension.get(extension, self.default)

    @property
    def compresses(self) -> bool:
        return any(one.name != "raw" for one in (self.default, *self.by_extension.values()))


def choose(compression: str | None, listing: Listing) -> Choice:
    """What ``in_memory.compression`` asks for; ``auto`` probes with lz4."""
    raw = codec("raw")
    if compression is None:
        return Choice({}, raw, {})
    if compression != "auto":
        return Choice({}, codec(compression), {})  # type: ignore[arg-type]
    lz4 = codec("lz4")
    ratios = {ending: probe(totals, lz4) for ending, totals in listing.extensions.items()}
    chosen = {ending: lz4 if ratio >= WORTHWHILE else raw for ending, ratio in ratios.items()}
    reasons = {ending: f"{chosen[ending].name}: lz4 gives {ratio:.2f}" for ending, ratio in ratios.items()}
    return Choice(chosen, raw, reasons)


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


def _middle(path: bytes, size: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, SAMPLE_BYTES, max(size // 2 - SAMPLE_BYTES // 2, 0))
    except OSError:
        return b""
    finally:
        os.close(fd)
