"""Torch's allocations in managed memory: why not here, the pool itself, or a record of what would have gone there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.allocator import split_options
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.driver.null import NullDriver

if TYPE_CHECKING:
    import torch

SOURCE = CSource(Path(__file__).with_name("allocator.c"), "the allocator of use_uvm", "set use_uvm to false")

Pattern = Literal["gpu_first", "balanced", "cpu_first"]
_PATTERNS: dict[str, int] = {"gpu_first": 0, "balanced": 1, "cpu_first": 2}

OLDEST_TORCH = Version("2.8")


def pool_refusal(torch_version: str, alloc_conf: str, caps: Capabilities, *, deepspeed: bool) -> str | None:
    """Why torch's allocations can't be routed to managed memory here; None where they can. Pure."""
    try:
        version = Version(torch_version.split("+")[0])
    except InvalidVersion:
        return f"torch's version {torch_version!r} can't be read"
    if version.release < OLDEST_TORCH.release:
        return f"torch {torch_version} has no usable MemPool; 2.8 is the first that has"
    if version.release[:2] == (2, 9) and _expandable(alloc_conf):
        return f"expandable_segments is on, and torch {torch_version} then ignores the pool's allocator"
    if deepspeed:
        return "DeepSpeed's engine allocates the optimizer state itself (use its own offloading)"
    if not caps.managed:
        return "the device has no managed memory"
    if not caps.concurrent_managed:
        return "CPU and GPU can't use managed memory at the same time on this device"
    return None


def _expandable(alloc_conf: str) -> bool:
    return dict(split_options(alloc_conf)).get("expandable_segments", "").strip().lower() == "true"


@dataclass(frozen=True)
class PoolState:
    """Bytes and counts as the allocator itself keeps them."""

    held: int
    peak: int
    limit: int
    allocations: int
    refused: int
    unadvised: int = 0
    """Allocations whose advice the driver did not take."""
    last_error: int = 0


def out_of_pool(size: int, state: PoolState, why: str) -> str:
    return ""


class Pool(Protocol):
    def use(self) -> AbstractContextManager[None]:
        """What the calling thread allocates on the device inside goes to the pool."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is this tensor's memory the pool's?"""

    def state(self) -> PoolState: ...


class Allocator:
    """The C side, through ctypes: what torch calls, and its counters. One per process, as its counters are."""

    def __init__(self, limit: int, pattern: Pattern) -> None:
        self.path = SOURCE.library()
        self._library = ctypes.CDLL(str(self.path))
        self._library.gh200_pool_configure.argtypes = (ctypes.c_uint64, ctypes.c_int)
        self._library.gh200_pool_alloc.restype = ctypes.c_void_p
        self._library.gh200_pool_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._library.gh200_pool_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        if not self._library.gh200_pool_configure(limit, _PATTERNS[pattern]):
            raise FeatureUnavailable("the allocator found no usable CUDA driver", remedy="see gh200 doctor")

    def alloc(self, size: int, ordinal: int) -> int | None:
        """As torch calls it; None where torch would raise OutOfMemoryError."""
        address = self._library.gh200_pool_alloc(size, ordinal, None)
        return int(address) if address else None

    def free(self, address: int, size: int, ordinal: int) -> None:
        self._library.gh200_pool_free(address, size, ordinal, None)

    def state(self) -> PoolState:
        values = (ctypes.c_uint64 * 7)()
        self._library.gh200_pool_read(values)
        return PoolState(*(int(value) for value in values))


class ManagedPool:
    """A ``torch.cuda.MemPool`` over the allocator."""

    def __init__(self, driver: Driver, *, limit: int, pattern: Pattern, ordinal: int = 0) -> None:
        import torch

        self._driver = driver
        self._ordinal = ordinal
        self._allocator = Allocator(limit, pattern)
        self._plugged = torch.cuda.memory.CUDAPluggableAllocator(
            str(self._allocator.path), "gh200_pool_alloc", "gh200_pool_free"
        )
        self._pool = torch.cuda.MemPool(self._plugged.allocator())
        _keep_forever(self._plugged, self._pool)

    def use(self) -> AbstractContextManager[None]:
        import torch

        used: AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pool, self._ordinal)
        return used

    def holds(self, tensor: torch.Tensor) -> bool:
        """As the driver tells, not as we remember."""
        return tensor.is_cuda and self._driver.pointer_kind(int(tensor.data_ptr())) == "managed"

    def state(self) -> PoolState:
        return self._allocator.state()


class RecordingPool:
    """Stands in where there is no CUDA device: memory stays the host's, and the null driver's record shows the rest."""

    def __init__(self, driver: NullDriver, *, limit: int, pattern: Pattern) -> None:
        driver.record("pool_open", limit=limit, pattern=pattern)
        self._driver = driver
        self._limit = limit
        self._held = self._count = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        self._driver.record("pool_enter")
        try:
            yield
        finally:
            self._driver.record("pool_leave")

    def place(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """These would be the pool's now."""
        found = list(tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in found)
        self._held += size
        self._count += len(found)
        self._driver.record("pool_place", what=what, tensors=len(found), size=size)

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def state(self) -> PoolState:
        return PoolState(self._held, self._held, self._limit, self._count, 0, 0)


def _keep_forever(*things: object) -> None:
    """Tensors may outlive whoever made the pool, and torch crashes where the allocator goes before its memory does."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def rehome(pool: Pool, tensors: Iterable[Any]) -> int:
    """Move device tensors that exist already into the pool, in place; returns how many were moved."""
    moved = 0
    for tensor in tensors:
        if not tensor.is_cuda or pool.holds(tensor):
            continue
        with pool.use():
            fresh = tensor.data.clone()
        tensor.data = fresh
        moved += 1
    return moved
