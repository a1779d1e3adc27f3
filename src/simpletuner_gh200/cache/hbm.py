"""The HBM tier: device copies of a fixed subset of hot embeds, so that a hit there needs no transfer.

An entry that is used while there is room gets its copy and keeps it: which ones those are is decided once, in the
order of first use, and never by forgetting. Entries are known by where their lent bytes are, which is theirs alone as
long as their segment lives; when a segment goes, all copies go.

Training comes first. Nothing is kept before ``allow``, which is called when the model, its gradients and its optimizer
have taken what they need; and at the first sign that device memory has run out everything is given back, for good.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import format_bytes

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.memory.lane import Copier

logger = logging.getLogger("simpletuner_gh200")

ToDevice = Callable[["torch.Tensor", tuple[Slab, int] | None], "torch.Tensor"]


class HbmTier:
    """``to_device`` copies a host tensor; it is told where the same bytes are published, if they are."""

    def __init__(self, tables: Sequence[Table], to_device: ToDevice) -> None:
        self._tables = tables
        self._limit = 0
        self._to_device = to_device
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._drops = self._count_drops()
        self._lock = threading.RLock()  # memory may run out in a copy of our own, inside it
        self.used = 0
        self.hits = 0
        self.given_up = False

    def allow(self, limit: int) -> None:
        """Keep so many bytes from now on; not once it was given up."""
        with self._lock:
            if not self.given_up:
                self._limit = limit

    def give_up(self) -> None:
        """Device memory has run out: all copies go, and none is kept again. Doing it twice is fine."""
        with self._lock:
            if self.given_up:
                return
            self.given_up, self._limit = True, 0
            if self.used:
                logger.warning("gh200: device memory ran out: hot text embeds gave back %s", format_bytes(self.used))
            self._kept.clear()
            self.used = 0

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes on the device: the copy that is kept there, or one made now. Not to be written to."""
        address, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        places = (table.published_at(address) for table in self._tables)
        place = next((found for found in places if found is not None), None)
        # A tensor that was written to since it was handed out is not what the entry holds.
        if place is None or tensor._version:
            return self._copied(tensor, None)
        with self._lock:
            self._forget_dropped()
            kept = self._kept.get((address, size))
            if kept is not None:
                self.hits += 1
                return kept
            made = self._copied(tensor, place)
            if self.used + size <= self._limit:
                self._kept[address, size] = made
                self.used += size
            return made

    def _copied(self, tensor: torch.Tensor, place: tuple[Slab, int] | None) -> torch.Tensor:
        import torch

        try:
            return self._to_device(tensor, place)
        except torch.cuda.OutOfMemoryError:
            self.give_up()
            return self._to_device(tensor, place)

    def _forget_dropped(self) -> None:
        drops = self._count_drops()
        if drops != self._drops:
            self._drops = drops
            self._kept.clear()
            self.used = 0

    def _count_drops(self) -> int:
        return sum(table.control.drops for table in self._tables)

    def close(self) -> None:
        self._kept.clear()


def through(copier: Copier, device: torch.device) -> ToDevice:
    """Copies through the copier's side stream from the slab itself, which is registered; the ordinary way otherwise."""

    def copy(tensor: torch.Tensor, place: tuple[Slab, int] | None) -> torch.Tensor:
        if place is not None:
            row = copier.copy([place[0].bytes_at(place[1], tensor.numel() * tensor.itemsize)])
            if row is not None:
                return row.view(tensor.dtype).view(tensor.shape)
        return tensor.to(device)

    return copy
