"""Settings that would make a run fit, or faster: each tried by the same arithmetic as the run itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from simpletuner_gh200.memory.pool.refusal import Training, training_refusal
from simpletuner_gh200.plan.beside import Constants
from simpletuner_gh200.plan.bounds import Bounds, bounds
from simpletuner_gh200.plan.facts import RunFacts, truth
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Placed, place
from simpletuner_gh200.plan.rows import POOLS, Pool
from simpletuner_gh200.plan.sizes import Sizes
from simpletuner_gh200.seams.features.activations.refusals import refusal_of
from simpletuner_gh200.units import format_seconds

MOST_AT_ONCE = 3


@dataclass(frozen=True)
class Situation:
    """What a plan is made of."""

    sizes: Sizes
    machine: Machine
    constants: Constants


@dataclass(frozen=True)
class Evaluated:
    """Facts with what follows from them."""

    facts: RunFacts
    placed: Placed
    bounds: Bounds
    fits: bool
    certain_overflow: Mapping[Pool, int]
    """Pool -> bytes beyond its capacity without anything assumed."""


def evaluate(facts: RunFacts, situation: Situation) -> Evaluated:
    placed = place(facts, situation.sizes, situation.machine, situation.constants)
    found = bounds(facts, situation.sizes, situation.machine, placed)
    fits, over = True, dict[Pool, int]()
    for pool in POOLS:
        capacity = situation.machine.capacity(pool)
        if capacity is None or (pool == "hbm" and situation.machine.one_pool):
            continue
        fits = fits and placed.table.used(pool) <= capacity
        least = placed.table.used(pool, certain=True)
        if least > capacity:
            over[pool] = least - capacity
    return Evaluated(facts, placed, found, fits, over)


@dataclass(frozen=True)
class Option:
    """One setting that can be changed. ``exact``: does it leave every number of the run as it was?"""

    what: str
    settings: Mapping[str, Any]
    facts: RunFacts
    exact: bool = True


@dataclass(frozen=True)
class Change:
    """An option, or several together, tried. ``cost``: seconds per optimizer step, below zero where it is faster."""

    what: str
    settings: Mapping[str, Any]
    fits: bool
    cost: float
    exact: bool

    def to_json(self) -> dict[str, Any]:
        keys = list(self.settings)
        return {
            "what": self.what,
            "key": ", ".join(keys),
            "value": self.settings[keys[0]] if len(keys) == 1 else [self.settings[key] for key in keys],
            "fits": self.fits,
            "cost": self.cost,
            "settings": dict(self.settings),
            "exact": self.exact,
        }

    def text(self) -> str:
        cost = (
            "no time"
            if abs(self.cost) < 0.0005
            else f"{format_seconds(abs(self.cost))} a step {'more' if self.cost > 0 else 'less'}"
        )
        return f"{self.what} ({', '.join(f'{key}={_shown(value)}' for key, value in self.settings.items())}): {cost}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def options(facts: RunFacts, situation: Situation) -> Iterator[Option]:
    """Everything that may be changed by itself, and isn't so already."""
    yield from _places(facts, situation)
    yield from _recompute(facts, situation)
    disk = situation.machine.disk
    if (
        facts.checkpoints > 1
        and disk is not None
        and place(facts, situation.sizes, situation.machine).table.used("disk") > disk
    ):
        fewer = replace(facts, checkpoints=1)
        yield Option("one checkpoint kept", {"checkpoints_total_limit": 1}, fewer)
    if facts.batch > 1 and not facts.ramped:  # a ramp decides about accumulation itself
        smaller = _largest_part(facts.batch)
        windows = facts.accumulation * facts.batch // smaller
        yield Option(
            "a smaller micro-batch, as much more accumulation: other buckets and rounding",
            {"train_batch_size": smaller, "gradient_accumulation_steps": windows},
            replace(facts, batch=smaller, accumulation=windows),
            exact=False,
        )
    if facts.full and not facts.drops_gradients:
        # Not exact: an optimizer still decays a parameter, and moves it by its momentum, where the gradient is zero.
        yield Option(
            "gradients dropped between steps: the same unless a parameter goes without one in some step",
            {"set_grads_to_none": True},
            replace(facts, drops_gradients=True),
            exact=False,
        )
    if facts.full and facts.optimizer != "ao-adamw8bit":
        yield Option(
            "8-bit optimizer state: other rounding",
            {"optimizer": "ao-adamw8bit"},
            replace(facts, optimizer="ao-adamw8bit"),
            exact=False,
        )
    if not facts.full and facts.quantised is None:
        yield Option(
            "a quantised base model: other rounding",
            {"base_model_precision": "int8-quanto"},
            replace(facts, base_precision="int8-quanto"),
            exact=False,
        )


def _largest_part(batch: int) -> int:
    """The largest proper divisor, so that no sample of an optimizer step is lost."""
    return next(part for part in range(batch // 2, 0, -1) if batch % part == 0)


def _places(facts: RunFacts, situation: Situation) -> Iterator[Option]:
    """Where bytes live; a single pool has nowhere else."""
    if situation.machine.one_pool or not situation.machine.has_device:
        return
    block = "gh200_optimizations"
    if not facts.state_in_grace and facts.full and not facts.sharded and _state_may_move(facts):
        named = {} if situation.machine.coherent else {f"{block}.uvm_access_pattern": facts.state_pattern}
        away = replace(facts, state_in_grace=True)
        yield Option("optimizer state in Grace", {f"{block}.use_uvm": True, **named}, away)
    if facts.activations == "off" and not facts.checkpointing and _activations_may_move(facts):
        yield Option("activations in Grace", {f"{block}.activations": "auto"}, replace(facts, activations="auto"))
    if facts.hbm_embeds:
        yield Option("no embeds in HBM", {"cache_config.hbm_limit_gb": 0}, replace(facts, hbm_embeds=0))


def _state_may_move(facts: RunFacts) -> bool:
    """Would the run take ``use_uvm``? Asked of what refuses there."""
    on = _switched_on(facts)
    asked = Training(
        deepspeed="deepspeed_config" in on,
        cpu_offload=on.get("optimizer_cpu_offload_method"),
        ramtorch="ramtorch" in on,
        releases_gradients="optimizer_release_gradients" in on,
    )
    return training_refusal(asked) is None


def _activations_may_move(facts: RunFacts) -> bool:
    on = _switched_on(facts)
    engine = "DEEPSPEED" if "deepspeed_config" in on else "FSDP" if facts.sharded else "NO"
    return refusal_of(on, engine) is None


def _switched_on(facts: RunFacts) -> dict[str, Any]:
    """Options that ask for something: files spell "off" in many ways, and the refusals expect SimpleTuner's values."""
    return {key: value for key, value in facts.options.items() if truth(value)}


def _recompute(facts: RunFacts, situation: Situation) -> Iterator[Option]:
    """Only between settings that were traced: a guess is no basis for advice."""
    other = not facts.checkpointing
    if other not in situation.sizes.traces or facts.sharded:
        return
    key = {"gradient_checkpointing": other}
    if other:
        away = replace(facts, checkpointing=True, activations="off")
        off = {"gh200_optimizations.activations": "off"} if facts.activations != "off" else {}
        yield Option("checkpointing: blocks are computed twice", {**key, **off}, away)
        return
    yield Option("no checkpointing", key, replace(facts, checkpointing=False))
    if not situation.machine.one_pool and situation.machine.has_device and _activations_may_move(facts):
        yield Option(
            "activations in Grace instead of checkpointing",
            {**key, "gh200_optimizations.activations": "auto"},
            replace(facts, checkpointing=False, activations="auto"),
        )


def _together(chosen: Iterable[Option], facts: RunFacts) -> Option | None:
    """Several at once; None where they speak of the same key."""
    settings: dict[str, Any] = {}
    merged = facts
    for option in chosen:
        if settings.keys() & option.settings.keys():
            return None
        settings.update(option.settings)
        moved = {key: value for key, value in vars(option.facts).items() if value != getattr(facts, key)}
        merged = replace(merged, **moved)
    chosen = list(chosen)
    what = "; ".join(option.what for option in chosen)
    return Option(what, settings, merged, all(option.exact for option in chosen))


def changes(facts: RunFacts, situation: Situation) -> list[Change]:
    """Every option by itself, and together only what does not fit alone; what fits first, then the cheapest first."""
    before = evaluate(facts, situation).bounds.serial
    single = list(options(facts, situation))
    tried = [_tried(option, situation, before) for option in single]
    for count in range(2, MOST_AT_ONCE + 1):
        for chosen in combinations(single, count):
            together = _together(chosen, facts)
            if together is not None:
                change = _tried(together, situation, before)
                if change.fits and not _covered(change, tried):
                    tried.append(change)
    return sorted(tried, key=_order)


def _order(change: Change) -> tuple[bool, bool, float, int]:
    return (not change.fits, not change.exact, change.cost, len(change.settings))


def _covered(change: Change, tried: Iterable[Change]) -> bool:
    """Is there one with fewer settings, all of them in this, that fits and costs no more?"""
    mine = change.settings.items()
    return any(other.fits and other.settings.items() <= mine and other.cost <= change.cost for other in tried)


def _tried(option: Option, situation: Situation, before: float) -> Change:
    found = evaluate(option.facts, situation)
    return Change(option.what, option.settings, found.fits, found.bounds.serial - before, option.exact)


def cheapest(found: Iterable[Change]) -> Change | None:
    """The first of them that fits: what to do where a run does not."""
    return next((change for change in found if change.fits), None)


def fastest(found: Iterable[Change]) -> Change | None:
    """The one that saves most time, changes no number and fits; None where the run is as fast as can be."""
    better = [change for change in found if change.fits and change.exact and change.cost < 0]
    return min(better, key=lambda change: change.cost, default=None)
