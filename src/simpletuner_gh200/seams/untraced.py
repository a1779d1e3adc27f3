"""What SimpleTuner's data factory gets in place of ``tracemalloc``.

The factory starts tracing to log how much memory it uses, and never stops: every object that Python makes from then on,
in every thread and in every step of training, is entered in a table under a lock. A plain loop takes ten times as long
so. The numbers it logs are those of the process instead.
"""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpletuner_gh200.units import KIB


class Untraced:
    """As the module, but that nothing is traced while ``spares()`` and nobody else has asked for it."""

    def __init__(self, spares: Callable[[], bool]) -> None:
        self._spares = spares

    def start(self, *frames: int) -> None:
        if not self._spares():
            tracemalloc.start(*frames)

    def get_traced_memory(self) -> tuple[int, int]:
        """(now, at most) in bytes: of what is traced, or of the process."""
        if tracemalloc.is_tracing() or not self._spares():
            return tracemalloc.get_traced_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        return _resident(peak), peak

    def __getattr__(self, name: str) -> Any:
        return getattr(tracemalloc, name)


def _resident(otherwise: int) -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return otherwise
    return int(pages) * resource.getpagesize()
