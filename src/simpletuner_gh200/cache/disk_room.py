"""How much of a disk packs may take: checkpoints are what a run is for, packs only make the next start faster."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from simpletuner_gh200.cache.pack import Item

KEEP_FREE = 0.1
"""Share of the disk that packs leave to others."""

LOOK_EVERY = 64 << 20
"""Others write to the disk too: after so many bytes it is asked again what is free."""


def must_stay_free(total: int, keep_free: int) -> int:
    """Bytes of a disk of ``total``: a tenth, or ``keep_free`` where that is more."""
    return max(int(total * KEEP_FREE), keep_free)


class DiskFull(Exception):
    """Writing would take what has to stay free."""

    def __init__(self, needed: int, free: int, reserve: int) -> None:
        super().__init__()
        self.needed, self.free, self.reserve = needed, free, reserve


class DiskRoom:
    """Of the disk that the open ``folder`` is on."""

    def __init__(self, folder: int, keep_free: int) -> None:
        self._folder = folder
        self._keep_free = keep_free

    def check(self, needed: int) -> None:
        """DiskFull where ``needed`` more bytes are too many."""
        found = os.fstatvfs(self._folder)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        reserve = must_stay_free(total, self._keep_free)
        if needed > free - reserve:
            raise DiskFull(needed, free, reserve)

    def watched(self, items: Iterable[Item], needed: int) -> Iterator[Item]:
        """The items, for as long as there is room: somebody may be writing a checkpoint to the same disk meanwhile."""
        done, asked = 0, 0
        self.check(needed)
        for item in items:
            done += item.payload.nbytes
            if done - asked >= LOOK_EVERY:
                asked = done
                self.check(max(needed - done, 0))
            yield item

    def refused(self, failed: OSError, needed: int) -> DiskFull | None:
        """The disk's own refusal, a quota included, as ours; None for any other error."""
        if failed.errno not in (errno.ENOSPC, errno.EDQUOT):
            return None
        found = os.fstatvfs(self._folder)
        return DiskFull(needed, found.f_bavail * found.f_frsize, 0)
