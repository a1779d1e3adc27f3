"""Where model state in Grace makes no sense, or can't be: every refusal with its reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.allocator import split_options
from simpletuner_gh200.memory.driver.interface import Capabilities

OLDEST_TORCH = Version("2.8")


@dataclass(frozen=True)
class Training:
    """What of a run's set-up decides whether its state can be placed."""

    deepspeed: bool = False
    cpu_offload: str | None = None
    """``optimizer_cpu_offload_method``, where one is set."""
    ramtorch: bool = False
    releases_gradients: bool = False


def training_refusal(training: Training) -> str | None:
    """Whoever else places the state, or steps outside the optimizer's own step, keeps it."""
    if training.deepspeed:
        return "DeepSpeed's engine allocates the optimizer state itself (use its own offloading)"
    if training.cpu_offload is not None:
        return f"optimizer_cpu_offload_method {training.cpu_offload!r} keeps the state in CPU memory already"
    if training.ramtorch:
        return "RamTorch keeps weights in CPU memory and steps there"
    if training.releases_gradients:
        return "optimizer_release_gradients steps inside the backward pass, on other threads"
    return None


def device_refusal(caps: Capabilities, *, by_name: bool) -> str | None:
    """``by_name``: the access pattern was written down, so somebody wants it here, too."""
    if caps.integrated:
        return "CPU and GPU share one physical pool: state elsewhere in it would save nothing"
    if caps.mode == "discrete" and not by_name:
        return (
            "host memory is behind PCIe, about ten times slower than a coherent link: it works, so write "
            "uvm_access_pattern into the configuration if you want it all the same"
        )
    return None


def torch_refusal(version: str, alloc_conf: str) -> str | None:
    try:
        release = Version(version.split("+")[0]).release
    except InvalidVersion:
        return f"torch's version {version!r} can't be read"
    if release < OLDEST_TORCH.release:
        return f"torch {version} has no usable MemPool; 2.8 is the first that has"
    if release[:2] < (2, 10) and _expandable(alloc_conf):
        return f"expandable_segments is on, and torch {version} then ignores the pool's allocator"
    return None


def _expandable(alloc_conf: str) -> bool:
    return dict(split_options(alloc_conf)).get("expandable_segments", "").strip().lower() == "true"
