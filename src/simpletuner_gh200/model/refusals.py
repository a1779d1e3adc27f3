"""What the model's memory in Grace can't be combined with, and where it makes no sense: each with its reason. Pure.

``config`` is SimpleTuner's own configuration, ``distributed`` accelerate's name for how the ranks work together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.allocator import split_options
from simpletuner_gh200.memory.driver.interface import Capabilities

OLDEST_TORCH = Version("2.8")

_OFF = ("", "no", "none", "disabled", "false")

_ENGINES = {
    "FSDP": "sharded weights come and go during a step",
    "DEEPSPEED": "its engine moves weights and gradients itself",
    "MEGATRON_LM": "its engine moves weights and gradients itself",
}


def state_refusal(config: Mapping[str, Any], distributed: str = "NO") -> str | None:
    """Whoever else places the state, or steps outside the optimizer's own step, keeps it."""
    if _engine(distributed) == "DEEPSPEED":
        return "DeepSpeed's engine allocates the optimizer state itself (use its own offloading)"
    offload = config.get("optimizer_cpu_offload_method")
    if _named(offload):
        return f"optimizer_cpu_offload_method {str(offload)!r} keeps the state in CPU memory already"
    if config.get("ramtorch"):
        return "RamTorch keeps weights in CPU memory and steps there"
    if config.get("optimizer_release_gradients"):
        return "optimizer_release_gradients steps inside the backward pass, on other threads"
    return None


def activations_refusal(config: Mapping[str, Any], distributed: str = "NO") -> str | None:
    """Why not beside what SimpleTuner is configured to do; None where nothing speaks against it."""
    swapped = "weights change their place during a step"
    own = "SimpleTuner's own offloading moves the same tensors"
    against = {
        "gradient_checkpointing_backend": (
            str(config.get("gradient_checkpointing_backend") or "").startswith("unsloth"),
            own,
        ),
        "gradient_checkpointing_offload_attention": (config.get("gradient_checkpointing_offload_attention"), own),
        "dynamo_backend": (
            _named(config.get("dynamo_backend")),
            "a compiled graph keeps most of what it saves out of autograd's sight",
        ),
        "ramtorch": (config.get("ramtorch"), "RamTorch frees and fetches weights during a step"),
        "musubi_blocks_to_swap": (int(config.get("musubi_blocks_to_swap") or 0) > 0, f"swapped blocks' {swapped}"),
        "enable_group_offload": (config.get("enable_group_offload"), f"offloaded groups' {swapped}"),
    }
    return _together(config, against, distributed)


def weights_refusal(config: Mapping[str, Any], distributed: str = "NO") -> str | None:
    """Why neither weights nor gradients may come and go beside what SimpleTuner is configured to do."""
    moves = "moves the same weights"
    steps = "steps while weights and gradients are on their way"
    against = {
        "dynamo_backend": (_named(config.get("dynamo_backend")), "a compiled graph does not ask for a block's weights"),
        "ramtorch": (config.get("ramtorch"), moves),
        "musubi_blocks_to_swap": (int(config.get("musubi_blocks_to_swap") or 0) > 0, moves),
        "enable_group_offload": (config.get("enable_group_offload"), moves),
        "optimizer_release_gradients": (config.get("optimizer_release_gradients"), steps),
        "optimizer_cpu_offload_method": (_named(config.get("optimizer_cpu_offload_method")), steps),
    }
    return _together(config, against, distributed)


def state_device_refusal(caps: Capabilities, *, by_name: bool) -> str | None:
    """``by_name``: the access pattern was written down, so somebody wants it here, too."""
    if caps.integrated:
        return "CPU and GPU share one physical pool: state elsewhere in it would save nothing"
    if caps.mode == "discrete" and not by_name:
        return (
            "host memory is behind PCIe, about ten times slower than a coherent link: it works, so write "
            "uvm_access_pattern into the configuration if you want it all the same"
        )
    return None


def activations_device_refusal(device: str, caps: Capabilities) -> str | None:
    """Why not on this device; the CPU stands in for both sides and is never refused here."""
    if device == "cpu":
        return None
    if device != "cuda" or caps.mode == "none":
        return f"the model is on {device!r}, and no CUDA driver is in use: {caps.absence or 'another kind of device'}"
    if caps.integrated:
        return "CPU and GPU share one memory here: what is moved would only be there twice"
    return None


def torch_refusal(version: str, alloc_conf: str) -> str | None:
    """Why this torch can't have a pool of Grace memory; None where it can."""
    try:
        release = Version(version.split("+")[0]).release
    except InvalidVersion:
        return f"torch's version {version!r} can't be read"
    if release < OLDEST_TORCH.release:
        return f"torch {version} has no usable MemPool; 2.8 is the first that has"
    expandable = dict(split_options(alloc_conf)).get("expandable_segments", "").strip().lower() == "true"
    if release[:2] < (2, 10) and expandable:
        return f"expandable_segments is on, and torch {version} then ignores the pool's allocator"
    return None


def _together(config: Mapping[str, Any], against: Mapping[str, tuple[Any, str]], distributed: str) -> str | None:
    """``against``: key -> is it on, and why not beside it."""
    found = [f"{key} = {config.get(key)!r}: {why}" for key, (is_on, why) in against.items() if is_on]
    engine = _engine(distributed)
    if engine in _ENGINES:
        found.append(f"{engine}: {_ENGINES[engine]}")
    return f"not tested together with {'; '.join(found)}" if found else None


def _named(value: Any) -> bool:
    """Does it name something? A string, or a member of an enumeration of accelerate's; files spell "off" many ways."""
    return str(value or "").rpartition(".")[2].strip().lower() not in _OFF


def _engine(distributed: str) -> str:
    return distributed.rpartition(".")[2].upper()
