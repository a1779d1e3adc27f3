"""Every byte of a run by pool and phase, by the policies that the run itself uses. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simpletuner_gh200.memory.ceilings import (
    activations_allowance,
    device_headroom,
)
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.model.activations.policy import Mix, Rates, choose
from simpletuner_gh200.model.placement import Placement, automatic_budget, split
from simpletuner_gh200.plan.beside import TRAINED, Constants, cached, disk, ema_saved, host, other_models
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.rows import Phase, Pool, Row, Source, Table, table
from simpletuner_gh200.plan.sharding import as_held, shard
from simpletuner_gh200.plan.sizes import Sizes, StateFacts, Step, one_step, optimizer_state
from simpletuner_gh200.units import GIB, MIB

SMALLEST_PLACED = MIB
STATE_PIECE = 64 * MIB
"""State is counted in pieces of this size where its tensors are not known one by one."""

FRAGMENTS = 0.03
"""Of torch's bytes, lost between blocks; assumed, 1 to 6 %."""


_LOADED: tuple[Phase, ...] = ("load", *TRAINED)


@dataclass(frozen=True)
class Placed:
    """The table, and what the policies decided on the way."""

    table: Table
    step: Step
    state: StateFacts
    state_in_hbm: int
    state_in_grace: int
    mix: Mix | None

    @property
    def transient(self) -> int:
        """Of the step, as far as it stays in HBM."""
        return _stays(self.step, self.mix)


def place(facts: RunFacts, sizes: Sizes, machine: Machine, constants: Constants | None = None) -> Placed:
    constants = constants or Constants()
    if machine.one_pool:
        facts = replace(facts, activations="off")  # refused there: what moves would only be there twice
    step = shard(facts, one_step(facts, sizes))
    kept = as_held(facts)
    state = optimizer_state(kept, step.trained, step.stepped)
    grace_left = _grace_for_model(facts, sizes, machine, constants)
    mix = _mix(facts, step, state, machine, grace_left, constants.context)
    here, there = _divide_state(kept, step, state, machine, mix, constants.context)
    rows = [
        *_model(kept, step, state, here, there, mix),
        *other_models(facts, sizes),
        *host(facts, sizes, machine, constants),
        *disk(kept, sizes, step, state),
    ]
    if machine.has_device:
        rows.append(Row("context", "hbm", None, constants.context, "assumed", constants.context_note))
    torchs = step.weights + step.gradients + _stays(step, mix) + here
    rows.append(Row("fragmentation", "hbm", "train", int(FRAGMENTS * torchs), "assumed", "1 to 6 % of torch's bytes"))
    placed = table(_doubted(row, facts, sizes) for row in rows if row.phase != "validate" or facts.validates)
    return Placed(placed.in_one_pool() if machine.one_pool else placed, step, state, here, there, mix)


_OF_THE_MODEL = frozenset({"weights", "gradients", "optimizer", "ema", "activations", "checkpoint", "checkpoints"})


def _doubted(row: Row, facts: RunFacts, sizes: Sizes) -> Row:
    """What others may keep elsewhere is a guess, and so is all of a model that is guessed: no refusal rests on it."""
    if sizes.denoiser.source == "assumed" and row.what in _OF_THE_MODEL:
        return replace(row, source="assumed", note=row.note or sizes.denoiser.note)
    if row.pool == "disk" or row.what not in facts.elsewhere:
        return row
    return replace(row, source="assumed", note=row.note or "another setting may keep it elsewhere")


def _grace_for_model(facts: RunFacts, sizes: Sizes, machine: Machine, constants: Constants) -> int:
    """Of one rank; what the node holds once is divided among its ranks."""
    shared = (sizes.data.held + cached(facts, sizes, machine)) // machine.sharing(facts.ranks)
    return max(machine.grace - shared - constants.process, 0)


def _mix(facts: RunFacts, step: Step, state: StateFacts, machine: Machine, grace: int, context: int) -> Mix | None:
    """Which blocks' saved tensors go to Grace; None where that is off. ``grace`` is what is free when the run asks."""
    if facts.activations == "off" or not step.blocks:
        return None
    resident = context + step.weights + step.gradients * facts.gradients_outlive
    resident += 0 if facts.state_in_grace else state.bytes
    others = step.forward - sum(block.saved for block in step.blocks)
    room = max(machine.hbm - resident - max(others, 0) - device_headroom(machine.hbm), 0)
    asked = None if facts.activation_limit is None else facts.activation_limit / GIB
    ranks = machine.sharing(facts.ranks)
    node = HostMemory(machine.grace * ranks, grace * ranks, grace * ranks, machine.name)
    allowed = activations_allowance(asked, node, ranks)
    rates = Rates(machine.d2h, machine.h2d, machine.flops)
    return choose(step.blocks, hbm_room=room, grace_limit=allowed.size, rates=rates)


def _stays(step: Step, mix: Mix | None) -> int:
    """Of what a step takes for a while, the bytes in HBM: without what is in Grace, or computed again."""
    if mix is None:
        return step.transient
    again = max(
        (block.saved for block, to in zip(step.blocks, mix.choices, strict=True) if to == "recompute"), default=0
    )
    return max(step.transient - mix.offloaded - max(mix.recomputed - again, 0), 0)


def _divide_state(
    facts: RunFacts, step: Step, state: StateFacts, machine: Machine, mix: Mix | None, context: int
) -> tuple[int, int]:
    """(in HBM, in Grace), as the run's own placement divides it."""
    if not facts.state_in_grace or machine.one_pool or not facts.full:
        return state.bytes, 0  # tensors of a LoRA are below what is worth placing
    peak = step.weights + step.gradients + _stays(step, mix)
    copies = step.trained * facts.bytes_per_weight
    at_step = step.weights + step.gradients + max(copies, _ema_update(facts, copies))
    automatic = automatic_budget(total=machine.hbm, elsewhere=context, peak=peak, at_step=at_step)
    budget = facts.state_budget if facts.state_budget is not None else automatic.size
    placement = Placement(facts.state_pattern, SMALLEST_PLACED, budget if facts.state_pattern == "gpu_first" else 0)
    whole, rest = divmod(state.bytes, STATE_PIECE)
    return split([*[STATE_PIECE] * whole, *([rest] if rest else [])], placement)


def _ema_update(facts: RunFacts, copies: int) -> int:
    """HBM that an update takes for a while: shadows of a CPU come over as a whole, and foreach makes a copy of its own.

    With model state in Grace the shadows live there for the device to reach, whatever ``ema_device`` says.
    """
    fetched = not facts.ema_on_device and not facts.state_in_grace
    return copies * (fetched + facts.ema_foreach) if facts.ema else 0


def _model(facts: RunFacts, step: Step, state: StateFacts, here: int, there: int, mix: Mix | None) -> Iterator[Row]:
    source: Source = step.weights_source
    if facts.quantised is not None:
        source = "computed"
    for phase in _LOADED:
        yield Row("weights", "hbm", phase, step.weights, source)
    read = "read into CPU memory first; mapped files may do with less"
    if step.whole:
        read = "every rank reads the whole model before it is sharded"
    yield Row("weights", "grace", "load", step.whole or step.weights, "assumed", read)
    gradients: Source = "computed" if facts.full or step.source == "computed" else "assumed"
    for phase in ("train",) if facts.drops_gradients else TRAINED:
        yield Row("gradients", "hbm", phase, step.gradients, gradients)
    offloaded = mix.offloaded if mix else 0
    copies = step.trained * facts.bytes_per_weight
    update = _ema_update(facts, copies)
    stays = _stays(step, mix)
    note = "an EMA update" if update > stays else ""
    yield Row("activations", "hbm", "train", max(stays, update), step.source, note)
    yield Row("activations", "grace", "train", offloaded, step.source, mix.why if mix else "")
    for phase in TRAINED:
        yield Row("optimizer", "hbm", phase, here, state.source, facts.optimizer)
        yield Row("optimizer", "grace", phase, there, state.source, facts.optimizer)
        if facts.ema:
            pool: Pool = "hbm" if facts.ema_on_device and not facts.state_in_grace else "grace"
            yield Row("ema", pool, phase, copies, "computed")
    together = "safetensors are put together in CPU memory" + (", on the first rank the whole model" * bool(step.whole))
    if facts.ema and facts.full:
        together = "shadows are copied into an fp32 model that is saved"
    yield Row("checkpoint", "grace", "save", max(step.whole or copies, ema_saved(facts, step)), "computed", together)
