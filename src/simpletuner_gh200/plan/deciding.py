"""``memory: "auto"``: what of a run leaves HBM, decided before it from bytes and cost. Pure.

Every set of things that may move is weighed by the plan's own arithmetic. What fits is taken, of that the fewest
seconds a step, of those the fewest moves; where two are equal, what is used least per byte leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, combinations
from typing import Any

from simpletuner_gh200.config.blocks import placed_setting
from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.model.refusals import activations_refusal, state_refusal, weights_refusal
from simpletuner_gh200.plan.evaluation import Evaluated, evaluate
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import cached
from simpletuner_gh200.plan.sizes import ModelSizes
from simpletuner_gh200.units import GIB, MIB, format_bytes

CACHES = "cache_config.memory_limit_gb"

_ROWS = {"optimizer": "state", "ema": "state", "caches": "caches"}
"""Rows of a plan that are called otherwise than the feature that moves them."""


@dataclass(frozen=True)
class Move:
    """One thing that may leave HBM."""

    feature: str
    settings: Mapping[str, Any]
    """``block.key`` -> value."""
    changed: Mapping[str, Any]
    """Fields of the facts."""
    uses: float
    """How often an optimizer step reads or writes each of its bytes."""

    @property
    def why(self) -> str:
        return f"each byte is used {self.uses:.3g} times a step"


@dataclass(frozen=True)
class MemoryDecision:
    """``settings`` by ``block.key``; ``then``: features that move next, should HBM run out all the same."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    then: tuple[str, ...] = ()
    why: str = ""
    placement: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def moves(facts: RunFacts, machine: Machine) -> list[Move]:
    """What is not in Grace yet and may go there, by the rules that refuse it in a run; what is used least first."""
    on = facts.switched_on
    engine = "DEEPSPEED" if "deepspeed_config" in on else "FSDP" if facts.sharded else "NO"
    known = optimizers().get(facts.optimizer)
    apart = machine.coherent and weights_refusal(on, engine) is None
    micro = 2.0 * facts.accumulation
    found = []
    if facts.full and not facts.sharded and not facts.state_in_grace and state_refusal(on, engine) is None:
        passes = known.reads + known.writes if known is not None else 4.0
        settings = placed_setting("state", device=machine.has_device)
        if not machine.coherent:
            settings["gh200_optimizations.uvm_access_pattern"] = facts.state_pattern
        uses = 2.0 if known is not None and known.streamable and machine.coherent else passes
        found.append(Move("state", settings, {"state_in_grace": True}, uses))
    if apart and facts.full and not facts.gradients_in_grace:
        settings = placed_setting("gradients", device=machine.has_device)
        found.append(Move("gradients", settings, {"gradients_in_grace": True}, facts.accumulation + 1.0))
    if apart and not facts.weights_in_grace:
        settings = placed_setting("weights", device=machine.has_device)
        found.append(Move("weights", settings, {"weights_in_grace": True}, micro + facts.full))
    if facts.activations == "off" and activations_refusal(on, engine) is None:
        settings = placed_setting("activations", device=machine.has_device)
        found.append(Move("activations", settings, {"activations": "auto"}, micro + 1))
    return sorted(found, key=lambda move: move.uses)


def decide(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> tuple[MemoryDecision, RunFacts]:
    """What is placed where, and the facts of the run with it."""
    possible = tuple(move for move in moves(facts, machine) if not facts.explicit & move.settings.keys())
    if not machine.has_device:
        why = "there is no GPU: all that may leave HBM does, with host memory on both sides, as a rehearsal"
        return _decided(facts, sizes, machine, possible, possible, why)
    if machine.one_pool:
        why = "CPU and GPU share one memory: there is nowhere to move anything to"
        return _decided(facts, sizes, machine, (), (), why)
    if not sizes.denoiser.parameters and not sizes.traces:
        return _decided(facts, sizes, machine, (), possible, "nothing is known of the model's size")
    chosen = min(_subsets(possible), key=lambda some: _weighed(_with(facts, some), sizes, machine, len(some)))
    before = evaluate(facts, sizes, machine).overflow().get("hbm", 0)
    why = f"HBM lacks {format_bytes(before)}" if before else "everything fits into HBM"
    why += "" if before or not chosen else ", and a step is faster this way"
    return _decided(facts, sizes, machine, chosen, possible, why)


def decided(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> RunFacts:
    """The run as it will be, whether something was left to decide or not."""
    return decide(facts, sizes, machine)[1] if facts.memory_auto else facts


def _subsets(possible: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    return chain.from_iterable(combinations(possible, count) for count in range(len(possible) + 1))


def _with(facts: RunFacts, chosen: tuple[Move, ...]) -> RunFacts:
    return replace(facts, **{key: value for move in chosen for key, value in move.changed.items()})


def _weighed(facts: RunFacts, sizes: ModelSizes, machine: Machine, count: int) -> tuple[int, float, int]:
    found = evaluate(_with_room(facts, sizes, machine), sizes, machine)
    over = found.overflow()
    return over.get("hbm", 0) + over.get("grace", 0), round(found.serial, 6), count


def _with_room(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> RunFacts:
    """Caches make room for the model: what they do not hold is read from files, once a pass."""
    over = evaluate(facts, sizes, machine).overflow().get("grace", 0) * machine.sharing(facts.ranks)
    held = cached(facts, sizes, machine)
    if not over or not held or CACHES in facts.explicit:
        return facts
    return replace(facts, cache_limit=max(held - over, MIB) // MIB * MIB)


def _decided(
    facts: RunFacts,
    sizes: ModelSizes,
    machine: Machine,
    chosen: tuple[Move, ...],
    possible: tuple[Move, ...],
    why: str,
) -> tuple[MemoryDecision, RunFacts]:
    moved = _with(facts, chosen)
    after = _with_room(moved, sizes, machine) if machine.has_device else moved
    settings = {key: value for move in chosen for key, value in move.settings.items()}
    reasons = {move.feature: move.why for move in chosen}
    if after.cache_limit != facts.cache_limit:
        settings[CACHES] = (after.cache_limit or 0) / GIB
        reasons["caches"] = "less than there is, since the model needs the room"
    found = evaluate(after, sizes, machine)
    then = tuple(move.feature for move in possible if move not in chosen)
    return MemoryDecision(settings, then, why, tuple(_placement(found, reasons))), after


def _placement(found: Evaluated, reasons: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for row in found.placement():
        reason = reasons.get(_ROWS.get(row["what"], row["what"]))
        yield {**row, "why": reason} if reason and row["pool"] == "grace" else row
