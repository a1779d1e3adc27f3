"""Byte and time quantities as people read them. GB in configuration keys means GiB throughout."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_STEPS = (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def gib_to_bytes(gib: float) -> int:
    """Whole bytes in so many GiB (configuration keys ending in ``_gb``)."""
    return int(gib * GIB)


def parse_bytes(text: str) -> int | None:
    """``100G``, ``1.5 TB``, ``4096`` in bytes, in steps of 1024; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else None


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``: three significant places, binary units."""
    for name, size in _STEPS:
        if abs(count) >= size:
            return f"{count / size:.3g} {name}" if count / size < 1000 else f"{count / size:.0f} {name}"
    return f"{count:.0f} B"


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 file``, ``2 files``; ``many`` where it is not just an s more."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """``0.042`` -> ``42 ms``, ``75`` -> ``1 min 15 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
