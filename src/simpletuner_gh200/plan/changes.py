"""Settings that would make a run fit, or faster: each tried by the same arithmetic as the run itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from simpletuner_gh200.plan.deciding import decided, moves
from simpletuner_gh200.plan.evaluation import evaluate
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.sizes import ModelSizes
from simpletuner_gh200.units import format_seconds

MOST_AT_ONCE = 3
LEAST = 0.0005
"""Seconds of a step that are worth a word."""

_BLOCK = "gh200_optimizations"


@dataclass(frozen=True)
class SettingChange:
    """One setting that can be changed, or several together, and what comes of it."""

    what: str
    settings: Mapping[str, Any]
    """``key`` or ``block.key`` -> value."""
    facts: RunFacts
    """Of the run with it."""
    exact: bool = True
    """Does it leave every number of the run as it was?"""
    fits: bool = False
    cost: float = 0.0
    """Seconds per optimizer step, below zero where it is faster."""

    def to_json(self) -> dict[str, Any]:
        values = list(self.settings.values())
        return {
            "what": self.what,
            "key": ", ".join(self.settings),
            "value": values[0] if len(values) == 1 else values,
            "fits": self.fits,
            "cost": self.cost,
            "settings": dict(self.settings),
            "exact": self.exact,
        }

    @property
    def faster(self) -> bool:
        """By as much as is written down."""
        return self.cost <= -LEAST

    @property
    def cost_in_words(self) -> str:
        if abs(self.cost) < LEAST:
            return "no time"
        return f"{format_seconds(abs(self.cost))} a step {'more' if self.cost > 0 else 'less'}"

    def text(self) -> str:
        return f"{self.what} ({in_words(self.settings)}): {self.cost_in_words}"


def in_words(settings: Mapping[str, Any]) -> str:
    written = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return ", ".join(f"{key}={value}" for key, value in written.items())


def changes(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> list[SettingChange]:
    """Every option by itself, and together only what does not fit alone; what fits first, then the cheapest first.

    ``facts`` as they are asked for, before ``memory: "auto"`` has decided.
    """
    before = evaluate(decided(facts, sizes, machine), sizes, machine).serial

    def tried(option: SettingChange) -> SettingChange:
        found = evaluate(decided(option.facts, sizes, machine), sizes, machine)
        return replace(option, fits=found.fits, cost=found.serial - before)

    single = [tried(option) for option in options(facts, sizes, machine)]
    found = list(single)
    for count in range(2, MOST_AT_ONCE + 1):
        for chosen in combinations(single, count):
            together = _together(chosen, facts)
            change = tried(together) if together is not None else None
            if change is not None and change.fits and not _covered(change, found):
                found.append(change)
    return sorted(found, key=lambda change: (not change.fits, not change.exact, change.cost, len(change.settings)))


def cheapest(found: Iterable[SettingChange]) -> SettingChange | None:
    """The first of them that fits: what to do where a run does not."""
    return next((change for change in found if change.fits), None)


def fastest(found: Iterable[SettingChange]) -> SettingChange | None:
    """The one that saves most time, changes no number and fits; None where the run is as fast as can be."""
    better = [change for change in found if change.fits and change.exact and change.faster]
    return min(better, key=lambda change: change.cost, default=None)


def _together(chosen: Iterable[SettingChange], facts: RunFacts) -> SettingChange | None:
    """Several at once; None where they speak of the same key."""
    settings: dict[str, Any] = {}
    merged = facts
    for option in chosen:
        if settings.keys() & option.settings.keys():
            return None
        settings.update(option.settings)
        moved = {key: value for key, value in vars(option.facts).items() if value != getattr(facts, key)}
        merged = replace(merged, **moved)
    what = "; ".join(option.what for option in chosen)
    return SettingChange(what, settings, merged, all(option.exact for option in chosen))


def _covered(change: SettingChange, found: Iterable[SettingChange]) -> bool:
    """Is there one with fewer settings, all of them in this, that fits and costs no more?"""
    mine = change.settings.items()
    return any(other.fits and other.settings.items() <= mine and other.cost <= change.cost for other in found)


# -- what may be changed -----------------------------------------------------------------------------------


def options(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> Iterator[SettingChange]:
    """Everything that may be changed by itself, and isn't so already; not tried yet."""
    apart = machine.has_device and not machine.one_pool  # a single pool has nowhere else
    if apart and not facts.memory_auto and moves(facts, machine):
        auto = replace(facts, memory_auto=True)
        yield SettingChange("what the model keeps placed by one setting", {f"{_BLOCK}.memory": "auto"}, auto)
    if (not facts.checkpointing) in sizes.traces and not facts.sharded:  # a guess is no basis for advice
        what = "no checkpointing" if facts.checkpointing else "checkpointing: blocks are computed twice"
        other = replace(facts, checkpointing=not facts.checkpointing)
        yield SettingChange(what, {"gradient_checkpointing": other.checkpointing}, other)
    if facts.checkpoints > 1 and "disk" in evaluate(facts, sizes, machine).overflow():
        yield SettingChange("one checkpoint kept", {"checkpoints_total_limit": 1}, replace(facts, checkpoints=1))
    yield from _other_numbers(facts)


def _other_numbers(facts: RunFacts) -> Iterator[SettingChange]:
    """What changes rounding, or more."""
    if facts.batch > 1 and not facts.ramped:  # a ramp decides about accumulation itself
        # The largest proper divisor, so that no sample of an optimizer step is lost.
        smaller = next(part for part in range(facts.batch // 2, 0, -1) if facts.batch % part == 0)
        windows = facts.accumulation * facts.batch // smaller
        yield SettingChange(
            "a smaller micro-batch, as much more accumulation: other buckets and rounding",
            {"train_batch_size": smaller, "gradient_accumulation_steps": windows},
            replace(facts, batch=smaller, accumulation=windows),
            exact=False,
        )
    if facts.full and not facts.drops_gradients:
        # Not exact: an optimizer still decays a parameter, and moves it by its momentum, where the gradient is zero.
        yield SettingChange(
            "gradients dropped between steps: the same unless a parameter goes without one in some step",
            {"set_grads_to_none": True},
            replace(facts, drops_gradients=True),
            exact=False,
        )
    small = "ao-adamw8bit"
    if facts.full and facts.optimizer != small:
        fewer_bits = replace(facts, optimizer=small)
        yield SettingChange("8-bit optimizer state: other rounding", {"optimizer": small}, fewer_bits, exact=False)
    base = "int8-quanto"
    if not facts.full and facts.quantised is None:
        fewer_bits = replace(facts, base_precision=base)
        what = "a quantised base model: other rounding"
        yield SettingChange(what, {"base_model_precision": base}, fewer_bits, exact=False)
