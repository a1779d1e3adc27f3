"""How the rows of a batch get to where the model wants them: one step, from published bytes to one stacked tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from simpletuner_gh200.cache.batch import assemble, rows_of
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.layout import Leaf
from simpletuner_gh200.cache.table import Found

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.staging.stager import DeviceStager


class Delivery(Protocol):
    """Given entries and, for each, the tensor in it: what ``torch.stack`` would give. None where it can't."""

    on_device: bool

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None: ...


class HostDelivery:
    """Into buffers on the CPU that are used again."""

    on_device = False

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        return assemble(entries, leaves, self.pool)


class DeviceDelivery:
    """Straight from the slab to the device on the stager's side stream; the CPU doesn't wait for the copies."""

    on_device = True

    def __init__(self, stager: DeviceStager) -> None:
        self._stager = stager
        self._batches = itertools.count()

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        import torch

        from simpletuner_gh200.memory.staging.layout import Range

        group = [
            Range(entry.segment.slab, entry.slot.offset + leaf.offset, (leaf.count,), getattr(torch, leaf.dtype))
            for entry, leaf in zip(entries, leaves, strict=True)
        ]
        (batch,) = self._stager.submit(next(self._batches), [group]).wait()
        return None if batch is None else rows_of(batch, leaves[0], len(entries))
