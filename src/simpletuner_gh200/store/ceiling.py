"""How much a dataset may hold: its own limit, and what the machine and its cgroups can really give."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner_gh200.errors import DatasetTooLarge
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import MIB, format_bytes, gib_to_bytes

WORKING_BYTES = 256 * MIB
"""What staging may need besides what it holds; never given to the dataset."""

HEADROOM_SHARE = 0.02
"""Left free besides: a machine whose last page is taken does not page, it kills."""


@dataclass(frozen=True)
class Ceiling:
    allowed: int
    why: str

    def too_large(self, needed: int, *, exact: bool, would_fit: dict[str, int]) -> DatasetTooLarge:
        """The error for ``needed`` bytes; ``would_fit`` are estimates for other codecs."""
        fitting = [f"{name} (about {format_bytes(size)})" for name, size in would_fit.items() if size <= self.allowed]
        if fitting:
            remedy = f'set "compression" to {" or ".join(fitting)}, which would fit'
        elif would_fit:
            least = min(would_fit.values())
            remedy = f"no compression makes it fit (at best about {format_bytes(least)}); raise the limit or stage less"
        else:
            remedy = "raise the limit, stage less with file_extensions, or leave this dataset at type local"
        amount = ("" if exact else "at least ") + format_bytes(needed)
        message = f"the dataset needs {amount} in memory, allowed are {format_bytes(self.allowed)} ({self.why})"
        return DatasetTooLarge(message, needed=needed, allowed=self.allowed, remedy=remedy)


def ceiling(memory_limit_gb: float | None, host: HostMemory) -> Ceiling:
    """The lower of the configured limit and what the machine can give."""
    possible = max(host.available - WORKING_BYTES - int(host.total * HEADROOM_SHARE), 0)
    if memory_limit_gb is not None and gib_to_bytes(memory_limit_gb) <= possible:
        return Ceiling(gib_to_bytes(memory_limit_gb), f"memory_limit_gb {memory_limit_gb:g}")
    return Ceiling(possible, f"{format_bytes(host.available)} by {host.limit}, less working memory and headroom")
