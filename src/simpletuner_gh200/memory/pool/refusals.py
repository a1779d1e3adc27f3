"""Why torch's allocations can't be routed to managed memory here. Pure."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.allocator import split_options
from simpletuner_gh200.memory.driver.interface import Capabilities

OLDEST_TORCH = Version("2.8")


def pool_refusal(torch_version: str, alloc_conf: str, caps: Capabilities, *, deepspeed: bool) -> str | None:
    """The reason in words, or None where a managed pool can work."""
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
