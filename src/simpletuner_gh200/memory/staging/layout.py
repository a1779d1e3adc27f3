"""Where the ranges of a batch land in one device buffer, and which copies bring them there. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpletuner_gh200.memory.driver.interface import Copy
from simpletuner_gh200.memory.slab import Slab

if TYPE_CHECKING:
    import torch

GROUP_ALIGNMENT = 256


@dataclass(frozen=True)
class Range:
    """One tensor inside a slab."""

    slab: Slab
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


Group = Sequence[Range]
"""Ranges of one shape and dtype, to be stacked into one tensor of shape (len, *shape)."""


@dataclass(frozen=True)
class Layout:
    """Offset of each group in a buffer of ``size`` bytes; inside a group the ranges follow each other without gaps."""

    offsets: tuple[int, ...]
    size: int


def check_group(group: Group) -> None:
    if not group:
        raise ValueError("a group needs at least one range")
    first = group[0]
    for other in group[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"a group is stacked, so its ranges are alike: {other.shape} {other.dtype} beside "
                f"{first.shape} {first.dtype}"
            )


def lay_out(groups: Sequence[Group]) -> Layout:
    offsets, end = [], 0
    for group in groups:
        check_group(group)
        start = -(-end // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
        offsets.append(start)
        end = start + sum(item.size for item in group)
    return Layout(tuple(offsets), end)


def copies_of(group: Group, destination: int) -> list[Copy]:
    """The copies that stack ``group`` at ``destination``, neighbours in both places merged into one."""
    merged: list[Copy] = []
    for item in group:
        source = item.slab.address + item.offset
        if merged and merged[-1][1] + merged[-1][2] == source:
            to, start, size = merged[-1]
            merged[-1] = (to, start, size + item.size)
        elif item.size:
            merged.append((destination, source, item.size))
        destination += item.size
    return merged
