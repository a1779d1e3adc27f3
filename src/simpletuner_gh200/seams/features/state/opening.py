"""Before a run's state goes to Grace: what is refused, and what an optimizer step needs besides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simpletuner_gh200.config.blocks import StateSettings
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.model.refusals import state_refusal
from simpletuner_gh200.seams.grace import Grace, unavailable


def check(settings: StateSettings, grace: Grace, trainer: Any, *, by_name: bool) -> None:
    """At the start of a run: refuse what can't be, before anything is loaded."""
    if settings.uvm_scope == "all":
        raise FeatureUnavailable(
            "gh200_optimizations.uvm_scope 'all' is not offered: every temporary of a step would live in Grace, which "
            "costs more than it gives, and what a side stream has used would never come back",
            remedy="set uvm_scope to 'optimizer'; for activations there is gh200_optimizations.activations",
        )
    distributed = str(getattr(trainer.accelerator, "distributed_type", ""))
    refusal = state_refusal(vars(trainer.config), distributed) or _streaming_refusal(settings, trainer)
    refusal = refusal or grace.refusal(trainer, by_name=by_name)
    if refusal is not None:
        raise unavailable("use_uvm", refusal)


def _streaming_refusal(settings: StateSettings, trainer: Any) -> str | None:
    if settings.uvm_streaming != "on":
        return None
    why = no_streaming(str(getattr(trainer.config, "optimizer", "")))
    return None if why is None else f'uvm_streaming "on": {why}'


def no_streaming(optimizer: str) -> str | None:
    """Why the step of this optimizer can't be streamed; None where it can."""
    facts = optimizers().get(optimizer)
    if facts is None:
        return f"{optimizer} is not in the table of optimizers that were tried"
    return None if facts.streamable else f"{optimizer} {facts.why_not}"


def trained_and_outliving(trainer: Any, groups: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Bytes of all parameters with a gradient, which a step may need once more for a moment; and of gradients that are
    zeroed after a step, not let go, and so are there in the next forward pass."""
    with_gradient = [weight for group in groups for weight in group["params"] if weight.grad is not None]
    dropped = getattr(trainer.config, "set_grads_to_none", False)
    outliving = 0 if dropped else sum(int(weight.grad.nbytes) for weight in with_gradient)
    return sum(int(weight.nbytes) for weight in with_gradient), outliving
