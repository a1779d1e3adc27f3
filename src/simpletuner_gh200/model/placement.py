"""Where model state lives, and how much of it: HBM up to a budget, Grace beyond. Pure; nothing here imports torch.

``gpu_first`` leaves state in HBM until a budget is used up; ``cpu_first`` and ``balanced``, which prefers no side, put
all of it into Grace memory that never migrates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.memory.ceilings import Allowance, device_headroom
from simpletuner_gh200.units import format_bytes

SLOTS = 2
"""For weights that come and go: one block computes while the next arrives."""

Pattern = Literal["gpu_first", "balanced", "cpu_first"]
Home = Literal["hbm", "pool"]


@dataclass(frozen=True)
class Placement:
    """The rule by which a tensor of state gets its home."""

    pattern: Pattern
    smallest: int
    """Bytes below which a tensor stays where it is: torch rounds every request in a pool up to megabytes."""
    budget: int = 0
    """Bytes of state that may stay in HBM; only ``gpu_first`` has any."""

    def home(self, size: int, in_hbm: int) -> Home:
        """Of one more tensor, where ``in_hbm`` bytes of state are in HBM already."""
        stays = self.pattern == "gpu_first" and in_hbm + size <= self.budget
        return "hbm" if stays else "pool"

    def takes(self, size: int, dimensions: int) -> bool:
        """Is such a tensor worth placing at all? Counters and small tensors are not."""
        return dimensions > 0 and size >= self.smallest and size > 0


def split(sizes: Iterable[int], placement: Placement) -> tuple[int, int]:
    """(bytes in HBM, bytes in the pool) of tensors of state that are born in this order."""
    hbm = pool = 0
    for size in sizes:
        if not placement.takes(size, 1) or placement.home(size, hbm) == "hbm":
            hbm += size
        else:
            pool += size
    return hbm, pool


def staying(sizes: Sequence[int], budget: int, slots: int) -> int:
    """How many of the last blocks can stay, where all blocks together may take ``budget`` bytes of HBM. Pure.

    The last ones, because backward begins with them; ``slots`` of the largest that still leaves are counted.
    """
    if sum(sizes) <= budget:
        return len(sizes)
    kept = 0
    while kept < len(sizes):
        leaving = sizes[: len(sizes) - kept - 1]
        if sum(sizes[len(leaving) :]) + slots * max(leaving, default=0) > budget:
            break
        kept += 1
    return kept


def automatic_budget(*, total: int, others: int, peak: int, at_step: int, outliving: int = 0) -> Allowance:
    """What ``gpu_first`` may keep in HBM: what the first forward and backward left, less a headroom.

    ``others`` is device memory that is not torch's (contexts, other processes), ``peak`` torch's own so far without
    the pool, ``at_step`` what the optimizer step and the EMA update need on top of what is held when they begin,
    ``outliving`` gradients that the first forward pass did not meet yet and every later one does.
    """
    headroom = device_headroom(total)
    needed = max(peak + outliving, at_step)
    size = max(total - others - needed - headroom, 0)
    why = (
        f"{format_bytes(total)} less {format_bytes(needed)} at the peak of a step, "
        f"{format_bytes(others)} of others and {format_bytes(headroom)} headroom"
    )
    return Allowance(size, why)
