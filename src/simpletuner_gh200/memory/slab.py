"""A slab: one region of memory that holds the tensors of one placement class, handed out as zero-copy views.

>>> slab = Slab.anonymous(1 << 20, label="latents")
>>> latent = slab.bytes_at(0, 4096)                          # writes go to the slab
>>> shared = Slab.shared(1 << 20, label="embeds")            # other ranks: Slab.attach(fd, size)

``close()`` refuses further views and drops the slab's own hold; the memory goes when the last view does.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

import numpy as np

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory import mapping
from simpletuner_gh200.memory.mapping import Region

SlabKind = Literal["host", "registered"]
"""Plain memory; host memory the GPU copies from at full speed."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Slab:
    """Exactly ``size`` bytes of one placement class.

    ``fd`` is there when other processes can map the same bytes; it belongs to the slab and is closed with it, so
    duplicate it before sending it on.
    """

    def __init__(self, region: Region, *, kind: SlabKind = "host", label: str = "slab", fd: int | None = None) -> None:
        self._region: Region | None = region
        self.size = region.size
        self.address = region.address
        self.kind: SlabKind = kind
        self.label = label
        self.fd = fd
        if fd is not None:
            region.before_release(partial(os.close, fd))

    # -- making ----------------------------------------------------------------------------------------

    @classmethod
    def anonymous(cls, size: int, *, label: str = "slab") -> Slab:
        """Memory of this process alone."""
        return cls(mapping.map_anonymous(size), label=label)

    @classmethod
    def shared(cls, size: int, *, label: str = "slab") -> Slab:
        """Memory behind a memfd, so that every rank of the node can map the same bytes."""
        fd = mapping.create_memfd(label, size, mapping.SIZE_SEALS)
        return cls._over(fd, size, label)

    @classmethod
    def attach(cls, fd: int, size: int, *, label: str = "slab") -> Slab:
        """Map what another rank made. Takes its own duplicate of ``fd``; the caller keeps the one it passed."""
        return cls._over(os.dup(fd), size, label)

    @classmethod
    def _over(cls, fd: int, size: int, label: str) -> Slab:
        try:
            region = mapping.map_file(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(region, label=label, fd=fd)

    # -- using -----------------------------------------------------------------------------------------

    @property
    def array(self) -> Bytes:
        """All bytes as numpy; keeps the memory alive."""
        return self.region.array()

    @property
    def region(self) -> Region:
        if self._region is None:
            raise MemoryRoomError(f"slab '{self.label}' is closed")
        return self._region

    def bytes_at(self, offset: int, size: int) -> Bytes:
        """``size`` bytes from ``offset``, zero-copy."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset}..{offset + size} are outside slab '{self.label}' of {self.size} bytes")
        return self.array[offset : offset + size]

    # -- ending ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """No further views; the memory goes back when those handed out are gone. Closing twice is fine."""
        self._region = None

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
