"""The arms of the comparison: what each changes in the configuration, and how its run shows that it was on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Summary = Mapping[str, Any]
"""Of a run, as its first rank leaves it."""

OURS = ("caches", "state", "activations")
"""Features that an arm may have, and every other must not."""


@dataclass(frozen=True)
class Arm:
    """``was_on`` says what the run's summary shows of it, or None where it was off."""

    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Blocks of ours and SimpleTuner's own options."""
    was_on: Callable[[Summary], str | None] = lambda _summary: "nothing of ours was on"
    feature: str | None = None
    option: str | None = None
    """Of SimpleTuner's: an arm of a release that has no such option is left out."""
    needs_gpu: bool = False
    needs_blocks: bool = False
    """Of a transformer: a U-Net has no row of them."""

    def verdict(self, summary: Summary) -> tuple[bool, str]:
        """Was it what it says, and what shows it? Anything of ours that an arm has not asked for is a failure."""
        features = summary.get("features") or {}
        extra = [name for name in OURS if name != self.feature and features.get(name) == "on"]
        if extra:
            return False, f"also on: {', '.join(extra)}"
        if self.feature is not None and features.get(self.feature) != "on":
            return False, f"{self.feature} is {features.get(self.feature, 'not there')}"
        shown = self.was_on(summary)
        return (True, shown) if shown is not None else (False, f"{self.feature or self.name} was on and did nothing")


def arms(*, tiny: bool, full: bool) -> Sequence[Arm]:
    """In the order of their weight: where time ends early, the last ones go without.

    ``tiny``: nothing is too small to be moved. ``full``: all weights are trained, so that their state has a size.
    """
    state: dict[str, Any] = {"use_uvm": True, "uvm_access_pattern": "cpu_first"}
    activations: dict[str, Any] = {"activations": "grace"}
    if tiny or not full:
        state["uvm_min_tensor_kb"] = 0
    if tiny:
        activations["activation_min_tensor_kb"] = 0
    unified = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"}
    return (
        Arm("stock", "SimpleTuner as it is"),
        Arm("caches", "unified caches", {"cache_config": unified}, _caches, "caches"),
        Arm("state", "optimizer state in Grace", {"gh200_optimizations": state}, _state, "state"),
        Arm(
            "activations",
            "activations in Grace, none computed again",
            {"gh200_optimizations": activations, "gradient_checkpointing": False},
            _activations,
            "activations",
        ),
        Arm("recompute", "SimpleTuner's gradient checkpointing", {"gradient_checkpointing": True}),
        *_UPSTREAM,
    )


_UPSTREAM = (
    Arm(
        "upstream-optimizer",
        "SimpleTuner's optimizer offload (torchao)",
        {"optimizer_cpu_offload_method": "torchao", "optimizer": "torch-adamw"},
        option="optimizer_cpu_offload_method",
        needs_gpu=True,
    ),
    Arm(
        "upstream-activations",
        "SimpleTuner's checkpointing with attention offloaded",
        {"gradient_checkpointing": True, "gradient_checkpointing_offload_attention": True},
        option="gradient_checkpointing_offload_attention",
        needs_gpu=True,
    ),
    Arm(
        "upstream-groups",
        "SimpleTuner's group offload of weights",
        {"enable_group_offload": True},
        option="enable_group_offload",
        needs_gpu=True,
    ),
    Arm(
        "upstream-blocks",
        "SimpleTuner's swap of eight transformer blocks",
        {"musubi_blocks_to_swap": 8},
        option="musubi_blocks_to_swap",
        needs_gpu=True,
        needs_blocks=True,
    ),
    Arm("upstream-ramtorch", "SimpleTuner's RamTorch", {"ramtorch": True}, option="ramtorch", needs_gpu=True),
)
"""Its own offloaders, as far as a release has them. They were never run here: each needs a GPU."""


_UNETS = ("sdxl", "sd1x", "sd2x", "kolors", "deepfloyd", "stable_cascade")


def left_out(arm: Arm, *, options: Collection[str], gpu: bool, family: object = None) -> str | None:
    """Why an arm is not tried here; None where it is."""
    if arm.option is not None and options and arm.option not in options:
        return f"this SimpleTuner has no {arm.option}"
    if arm.needs_gpu and not gpu:
        return "needs a GPU"
    if arm.needs_blocks and family in _UNETS:
        return f"{family} has no row of transformer blocks"
    return None


def _caches(summary: Summary) -> str | None:
    tables = _details(summary, "caches")
    hits = sum(int(table.get("hits") or 0) for table in tables.values() if isinstance(table, Mapping))
    return f"{hits} samples came from slabs" if hits else None


def _state(summary: Summary) -> str | None:
    found = _details(summary, "state")
    if not found.get("tensors"):
        return None
    return f"{found['tensors']} tensors, {found['bytes']} bytes, by {found['mechanism']}"


def _activations(summary: Summary) -> str | None:
    found = _details(summary, "activations")
    return f"{found['moved']} of {found['saved']} bytes moved" if found.get("moved") else None


def _details(summary: Summary, feature: str) -> Mapping[str, Any]:
    found = (summary.get("details") or {}).get(feature)
    return found if isinstance(found, Mapping) else {}
