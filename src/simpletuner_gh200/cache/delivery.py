"""How the rows of a batch get to where the model wants them: one step, from published bytes to one stacked tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from simpletuner_gh200.cache.batch import assemble, rows_of
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.layout import Leaf
from simpletuner_gh200.cache.table import Found
from simpletuner_gh200.memory.copier import SlabRange

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.copier import Copier


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
    """Straight from the slab to the device on the copier's side stream; the CPU doesn't wait for the copies."""

    on_device = True

    def __init__(self, copier: Copier[torch.Tensor]) -> None:
        self._copier = copier

    def rows(self, entries: Sequence[Found], leaves: Sequence[Leaf]) -> torch.Tensor | None:
        import torch

        dtype: torch.dtype = getattr(torch, leaves[0].dtype)
        size = leaves[0].count * dtype.itemsize
        flat = self._copier.copy(
            [
                SlabRange(entry.segment.slab, entry.slot.offset + leaf.offset, size)
                for entry, leaf in zip(entries, leaves, strict=True)
            ]
        )
        return None if flat is None else rows_of(flat.view(dtype), leaves[0], len(entries))
