"""So many pictures of so many pixels, a model, a machine: how long it takes stock SimpleTuner, and how long with us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.planning import Plan, make_plan, unwritten
from simpletuner_gh200.plan.starting import Pictures
from simpletuner_gh200.units import format_seconds
from simpletuner_gh200.upstream.option_table import OptionTable

OURS: Mapping[str, Any] = {
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
    "gh200_optimizations": {"memory": "auto"},
}
USUAL: Mapping[str, Any] = {
    "optimizer": "adamw_bf16",
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
    "validation_disable": True,
    "resolution_type": "pixel",
    "num_train_epochs": 1,
    "max_train_steps": 0,
}


def asked(
    model: Mapping[str, Any],
    machine: Machine,
    *,
    pictures: int,
    pixels: int,
    full: bool,
    batch: int,
    trace: bool = True,
    options: OptionTable | None = None,
) -> dict[str, Plan]:
    """The plan of one pass over the pictures, ``without`` us and ``with``. ``model``: SimpleTuner's keys for it."""
    kind = {"model_type": "full"} if full else {"model_type": "lora", "lora_type": "standard", "lora_rank": 16}
    values = {**USUAL, **kind, **model, "resolution": pixels, "train_batch_size": batch}
    given = Pictures(pictures, pictures * pixels**2 / 1e6)
    return {
        way: make_plan(unwritten({**values, **blocks}, options), machine, trace=trace, pictures=given)
        for way, blocks in (("without", {}), ("with", OURS))
    }


def to_json(found: Mapping[str, Plan]) -> dict[str, Any]:
    """Seconds; ``a_pass`` None where it does not fit."""
    return {
        way: {
            "fits": plan.fits,
            "start": dict(plan.start),
            "a_pass": plan.whole.seconds if plan.fits and plan.whole is not None else None,
            "binding": plan.evaluated.binding,
            "rates": plan.machine.rate_sources,
        }
        for way, plan in found.items()
    }


def rows(found: Mapping[str, Plan]) -> Iterator[tuple[str, str, str]]:
    """What, without us, and with."""
    plans = [found["without"], found["with"]]
    for name in plans[0].start:
        without, with_us = (format_seconds(plan.start[name]) for plan in plans)
        yield f"once, with empty caches: {name}", without, with_us
    without, with_us = map(_a_pass, plans)
    yield "each pass over the pictures, at least", without, with_us


def sources(plan: Plan) -> str:
    """Of the rates that count, in words."""
    known = plan.machine.rate_sources
    return "; ".join(f"{name} {known[name]}" for name in ("flops", "h2d", "disk_rate", "from_files", "from_slabs"))


def _a_pass(plan: Plan) -> str:
    if not plan.fits:
        return "does not fit"
    if plan.whole is None or not plan.sizes.traces:
        return "not known: the step was not traced"
    return f"{format_seconds(plan.whole.seconds)} ({plan.evaluated.binding} binds)"
