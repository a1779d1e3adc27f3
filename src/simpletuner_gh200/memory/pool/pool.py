"""Torch's allocations in Grace memory: the C allocator, and a ``torch.cuda.MemPool`` over it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource
from simpletuner_gh200.units import format_bytes

if TYPE_CHECKING:
    import torch

SOURCE = CSource(Path(__file__).with_name("allocator.c"), "the allocator of use_uvm", "set use_uvm to false")

Mechanism = Literal["host", "vmm"]
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)
_NUMBERS = {name: number for number, name in enumerate(MECHANISMS, start=1)}

LIMIT, HOST_IS_SHORT, DRIVER = 1, 2, 3
REFUSALS = {
    LIMIT: "the pool's limit is reached",
    HOST_IS_SHORT: "the host has too little memory left",
    DRIVER: "the driver refused",
}


@dataclass(frozen=True)
class PoolState:
    """Bytes and counts as the allocator itself keeps them."""

    held: int
    peak: int
    limit: int
    allocations: int
    refused: int
    unbound: int = 0
    """Allocations that could not be bound to the CPU node of the GPU."""
    last_error: int = 0
    last_refusal: int = 0


@dataclass(frozen=True)
class Share:
    """Of torch's statistics of a device, the bytes that are in Grace and not in HBM."""

    reserved: int = 0
    allocated: int = 0

    @property
    def idle(self) -> int:
        """Held by torch and used by nobody: a reserve, and what state that is gone has left."""
        return self.reserved - self.allocated


def out_of_pool(size: int | None, state: PoolState, why: str) -> str:
    """What users read where the pool has no more; ``size``: what was asked for, where that is known."""
    what = "What is being loaded or made" if size is None else f"{format_bytes(size)} more of model state"
    reason = REFUSALS.get(state.last_refusal, REFUSALS[LIMIT])
    if state.last_refusal == DRIVER:
        reason += f" with error {state.last_error}"
    return (
        f"gh200: {what} does not fit into Grace memory: {reason} "
        f"({format_bytes(state.held)} held, {format_bytes(state.limit)} allowed: {why}). Raise "
        "uvm_oversubscription_ratio if that is what limits it, lower cache_config.memory_limit_gb or the ranks per "
        "node, or take an optimizer that keeps less (docs/reference/optimizers.md)"
    )


class Allocator:
    """The C side, through ctypes: what torch calls, and its counters. One per process, as its counters are."""

    def __init__(self, mechanism: Mechanism, *, limit: int, floor: int = 0, node: int | None = None) -> None:
        """``floor``: host memory that is never taken, 0: the driver is the judge; ``node``: CPU node to bind to."""
        self.path = SOURCE.library()
        self._library = ctypes.CDLL(str(self.path))
        self._library.gh200_pool_configure.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        self._library.gh200_pool_alloc.restype = ctypes.c_void_p
        self._library.gh200_pool_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._library.gh200_pool_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._library.gh200_pool_home.argtypes = (ctypes.c_size_t,)
        number = _NUMBERS[mechanism]
        if not self._library.gh200_pool_configure(number, limit, floor, -1 if node is None else node):
            raise FeatureUnavailable("the allocator found no usable CUDA driver", remedy="see gh200 doctor")

    def alloc(self, size: int, ordinal: int) -> int | None:
        """As torch calls it; None where torch would raise OutOfMemoryError."""
        address = self._library.gh200_pool_alloc(size, ordinal, None)
        return int(address) if address else None

    def free(self, address: int, size: int, ordinal: int) -> None:
        self._library.gh200_pool_free(address, size, ordinal, None)

    def home(self, address: int) -> Mechanism | None:
        """How the block that this address is in was allocated; None where it is none of the pool's."""
        number = int(self._library.gh200_pool_home(address))
        return MECHANISMS[number - 1] if number else None

    def state(self) -> PoolState:
        values = (ctypes.c_uint64 * 8)()
        self._library.gh200_pool_read(values)
        return PoolState(*(int(value) for value in values))


class GracePool:
    """A ``torch.cuda.MemPool`` over the allocator. Its context is as short as one allocation."""

    device = "cuda"

    def __init__(
        self, mechanism: Mechanism, *, limit: int, why: str, ordinal: int = 0, floor: int = 0, node: int | None = None
    ) -> None:
        import torch

        self.mechanism: str = mechanism
        self._why = why
        self.ordinal = ordinal
        self.reserve: Reserve | None = None
        self._allocator = Allocator(mechanism, limit=limit, floor=floor, node=node)
        self._plugged = torch.cuda.memory.CUDAPluggableAllocator(
            str(self._allocator.path), "gh200_pool_alloc", "gh200_pool_free"
        )
        self._pools: list[Any] = []
        self._pool = self._make()

    def _make(self, **options: Any) -> Any:
        import torch

        pool = torch.cuda.MemPool(self._plugged.allocator(), **options)
        _keep_forever(self._plugged, pool)
        self._pools.append(pool)
        return pool

    @contextmanager
    def use(self, size: int | None = None) -> Iterator[None]:
        """What the calling thread allocates on the device inside goes to the pool; ``size``: how much that will be.

        Where it does not fit, torch's own error says why.
        """
        import torch

        try:
            with torch.cuda.use_mem_pool(self._pool, self.ordinal):
                yield
        except torch.OutOfMemoryError as full:
            raise torch.OutOfMemoryError(f"{out_of_pool(size, self.state(), self._why)}\n{full}") from full

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fresh memory of the pool for a tensor like this, in the same layout."""
        import torch

        with self.use(tensor.numel() * tensor.element_size()):
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_cuda) and self._allocator.home(int(tensor.data_ptr())) is not None

    def state(self) -> PoolState:
        return self._allocator.state()

    def share(self) -> Share:
        """Its share, any reserve's included, of what torch says is reserved and allocated on the device."""
        segments = [segment for pool in self._pools for segment in pool.snapshot()]
        return Share(
            reserved=sum(int(segment["total_size"]) for segment in segments),
            allocated=sum(int(segment["allocated_size"]) for segment in segments),
        )

    def open_reserve(self, size: int) -> Reserve:
        """Grace memory that torch may use where HBM has no more; counts against the pool's limit."""
        self.reserve = Reserve(self, self._make(use_on_oom=True), size, self.ordinal)
        return self.reserve


class Reserve:
    """The soft landing: blocks of a pool that torch turns to when HBM refuses. Opened once, then only looked at."""

    def __init__(self, grace: GracePool, pool: Any, size: int, ordinal: int) -> None:
        import torch

        self._pool = pool
        self.size = size
        before = grace.state().held
        try:
            with torch.cuda.use_mem_pool(pool, ordinal):
                block = torch.empty(size, dtype=torch.uint8, device=f"cuda:{ordinal}")
        except torch.OutOfMemoryError as full:
            why = out_of_pool(size, grace.state(), "oom_reserve_gb counts against it")
            raise FeatureUnavailable(why, remedy="lower oom_reserve_gb") from full
        del block  # free, and kept: torch uses only what the pool has
        self.held = grace.state().held - before
        self.most = 0
        """Bytes in use at most, whenever somebody looked."""
        self.times = 0
        """How often it was in use when somebody looked, and not the time before."""
        self._was_used = False

    def look(self) -> int:
        """Bytes of it in use now."""
        used = sum(int(segment["active_size"]) for segment in self._pool.snapshot())
        self.times += bool(used) and not self._was_used
        self._was_used = bool(used)
        self.most = max(self.most, used)
        return used


def _keep_forever(*things: object) -> None:
    """Tensors may outlive whoever made the pool, and torch crashes where the allocator goes before its memory does."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
