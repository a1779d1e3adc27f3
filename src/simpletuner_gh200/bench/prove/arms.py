"""The arms of the comparison: what each changes in the configuration, and how its run shows that it was on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Summary = Mapping[str, Any]
"""Of a run, as its first rank leaves it."""

OURS = ("caches", "state", "activations")
"""Features that an arm may have, and every other must not."""


@dataclass(frozen=True)
class Arm:
    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Blocks of ours and SimpleTuner's own options."""
    feature: str | None = None
    option: str | None = None
    """Of an offloader of SimpleTuner's: left out where a release has no such option, and where there is no GPU."""

    def verdict(self, summary: Summary) -> tuple[bool, str]:
        """Was it what it says, and what shows it? Anything of ours that an arm has not requested is a failure."""
        features = summary.get("features") or {}
        extra = [name for name in OURS if name != self.feature and features.get(name) == "on"]
        if extra:
            return False, f"also on: {', '.join(extra)}"
        if self.feature is None:
            return True, "nothing of ours was on"
        if features.get(self.feature) != "on":
            return False, f"{self.feature} is {features.get(self.feature, 'not there')}"
        shown = _shown(self.feature, (summary.get("details") or {}).get(self.feature) or {})
        return (True, shown) if shown else (False, f"{self.feature} was on and did nothing")

    def left_out(self, *, options: Collection[str], gpu: bool, family: object = None) -> str | None:
        """Why it is not tried here; None where it is. ``options``: of this release, none where they are unknown."""
        if self.option is None:
            return None
        if options and self.option not in options:
            return f"this SimpleTuner has no {self.option}"
        if not gpu:
            return "needs a GPU"
        if self.option == "musubi_blocks_to_swap" and family in _UNETS:
            return f"{family} has no row of transformer blocks"
        return None


_UNETS = ("sdxl", "sd1x", "sd2x", "kolors", "deepfloyd", "stable_cascade")


def _shown(feature: str, details: Mapping[str, Any]) -> str | None:
    """What of a feature's part of the summary shows that it did its work; None where it did none."""
    if feature == "caches":
        hits = sum(int(table.get("hits") or 0) for table in details.values() if isinstance(table, Mapping))
        return f"{hits} samples came from slabs" if hits else None
    if feature == "state":
        if not details.get("tensors"):
            return None
        return f"{details['tensors']} tensors, {details['bytes']} bytes, by {details['mechanism']}"
    return f"{details['moved']} of {details['saved']} bytes moved" if details.get("moved") else None


def arms(*, tiny: bool, full: bool) -> Sequence[Arm]:
    """In the order of their weight: where time ends early, the last ones go without.

    ``tiny``: nothing is too small to be moved. ``full``: all weights are trained, so that their state has a size.
    """
    unified = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"}
    state = {"use_uvm": True, "uvm_access_pattern": "cpu_first"}
    state |= {"uvm_min_tensor_kb": 0} if tiny or not full else {}
    activations = {"activations": "grace", **({"activation_min_tensor_kb": 0} if tiny else {})}
    moved = {"gh200_optimizations": activations, "gradient_checkpointing": False}
    return (
        Arm("stock", "SimpleTuner as it is"),
        Arm("caches", "unified caches", {"cache_config": unified}, "caches"),
        Arm("state", "optimizer state in Grace", {"gh200_optimizations": state}, "state"),
        Arm("activations", "activations in Grace, none computed again", moved, "activations"),
        Arm("recompute", "SimpleTuner's gradient checkpointing", {"gradient_checkpointing": True}),
        *(_offloader(*row) for row in _OFFLOADERS),
    )


_OFFLOADERS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("optimizer", "optimizer offload (torchao)", {"optimizer_cpu_offload_method": "torchao"}),
    ("activations", "checkpointing with attention offloaded", {"gradient_checkpointing_offload_attention": True}),
    ("groups", "group offload of weights", {"enable_group_offload": True}),
    ("blocks", "swap of eight transformer blocks", {"musubi_blocks_to_swap": 8}),
    ("ramtorch", "RamTorch", {"ramtorch": True}),
)
"""SimpleTuner's own, as far as a release has them: name, title, option. They were never run here: each needs a GPU."""
_BESIDES: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {"optimizer": "torch-adamw"},
    "activations": {"gradient_checkpointing": True},
}
"""Settings besides."""


def _offloader(name: str, title: str, option: Mapping[str, Any]) -> Arm:
    settings = {**_BESIDES.get(name, {}), **option}
    return Arm(f"upstream-{name}", f"SimpleTuner's {title}", settings, option=next(iter(option)))
