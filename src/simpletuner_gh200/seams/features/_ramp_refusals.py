"""Where the ramp can't hold its promise, and says so before anything is built."""

from __future__ import annotations

from typing import Any

from simpletuner_gh200.errors import ConfigError, FeatureUnavailable, Problem


def refuse_impossible(config: Any, accelerator: Any) -> None:
    """Raise for a set-up in which windows of changing size would not weigh exactly 1."""
    if _deepspeed(config, accelerator):
        raise _refusal("DeepSpeed", "its engine owns gradient accumulation", "train without DeepSpeed")
    if getattr(config, "ramtorch", False):
        raise _refusal("ramtorch", "it clears gradients after every micro-batch", "turn ramtorch off")
    if getattr(config, "optimizer_release_gradients", False):
        reason = "gradients are consumed during the backward pass, so that no window of them exists"
        raise _refusal("optimizer_release_gradients", reason, "turn optimizer_release_gradients off")
    steps = getattr(config, "max_train_steps", None)
    if not steps or int(steps) < 1:
        message = f"{steps!r}: needed with the batch ramp, since an epoch has no fixed number of optimizer steps"
        remedy = "set it; `gh200 ramp CONFIG` shows how many samples it takes"
        raise ConfigError([Problem("max_train_steps", message, remedy)])


def _deepspeed(config: Any, accelerator: Any) -> bool:
    plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
    named = str(getattr(accelerator, "distributed_type", "")).upper().endswith("DEEPSPEED")
    return plugin is not None or named or bool(getattr(config, "use_deepspeed_optimizer", False))


def _refusal(what: str, reason: str, remedy: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"the batch ramp can't work with {what}: {reason}",
        remedy=f'{remedy}, or set "enable_batch_size_rampup": false',
    )
