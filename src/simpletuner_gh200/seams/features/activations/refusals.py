"""What activations in Grace have not been tested with, and why each of them matters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simpletuner_gh200.memory.driver.interface import Capabilities

_OFF = ("", "no", "none", "disabled", "false")


def _compiled(config: Mapping[str, Any]) -> bool:
    named = str(config.get("dynamo_backend") or "").rpartition(".")[
        2
    ]  # a string, or a member of accelerate's enumeration
    return named.strip().lower() not in _OFF


_TOGETHER: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        "gradient_checkpointing_backend",
        lambda config: str(config.get("gradient_checkpointing_backend") or "").startswith("unsloth"),
        "SimpleTuner's own offloading moves the same tensors",
    ),
    (
        "gradient_checkpointing_offload_attention",
        lambda config: bool(config.get("gradient_checkpointing_offload_attention")),
        "SimpleTuner's own offloading moves the same tensors",
    ),
    ("dynamo_backend", _compiled, "a compiled graph keeps most of what it saves out of autograd's sight"),
    ("ramtorch", lambda config: bool(config.get("ramtorch")), "RamTorch frees and fetches weights during a step"),
    (
        "musubi_blocks_to_swap",
        lambda config: int(config.get("musubi_blocks_to_swap") or 0) > 0,
        "swapped blocks' weights change their place during a step",
    ),
    (
        "enable_group_offload",
        lambda config: bool(config.get("enable_group_offload")),
        "offloaded groups' weights change their place during a step",
    ),
)

_ENGINES = {
    "FSDP": "sharded weights come and go during a step",
    "DEEPSPEED": "its engine moves weights and gradients itself",
    "MEGATRON_LM": "its engine moves weights and gradients itself",
}


def refusal_of(config: Mapping[str, Any], distributed: str = "NO") -> str | None:
    """Why not beside what SimpleTuner is configured to do; None where nothing speaks against it.

    ``distributed`` is accelerate's name for how the ranks work together.
    """
    found = [f"{key} = {config.get(key)!r}: {why}" for key, asks, why in _TOGETHER if asks(config)]
    engine = distributed.rpartition(".")[2].upper()
    if engine in _ENGINES:
        found.append(f"{engine}: {_ENGINES[engine]}")
    return f"not tested together with {'; '.join(found)}" if found else None


def refusal_here(device: str, caps: Capabilities) -> str | None:
    """Why not on this device; the CPU stands in for both sides and is never refused here."""
    if device == "cpu":
        return None
    if device != "cuda" or caps.mode == "none":
        return f"the model is on {device!r}, and no CUDA driver is in use: {caps.absence or 'another kind of device'}"
    if caps.integrated:
        return "CPU and GPU share one memory here: what is moved would only be there twice"
    return None
