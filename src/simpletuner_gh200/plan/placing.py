"""What of a step stays in HBM and what goes to Grace, by the policies that the run itself uses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simpletuner_gh200.memory.ceilings import activations_allowance, caches_allowance, device_headroom
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.model.activations.policy import Mix, Rates, choose
from simpletuner_gh200.model.placement import SLOTS, Placement, automatic_budget, split, staying
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.sizes import ModelSizes
from simpletuner_gh200.plan.steps import OptimizerState, StepSizes, as_held, one_step, optimizer_state, shard
from simpletuner_gh200.units import MIB

SMALLEST_PLACED = MIB
STATE_PIECE = 64 * MIB
"""State is counted in pieces of this size where its tensors are not known one by one."""


@dataclass(frozen=True)
class Placed:
    """One rank of a run on a machine, and what the policies decided: all that a row or a bound is made of."""

    facts: RunFacts
    sizes: ModelSizes
    machine: Machine
    step: StepSizes
    state: OptimizerState
    whole_weights: int = 0
    """Of ``step.weights``, before any of them left."""
    weights_in_grace: int = 0
    gradients_in_grace: int = 0
    """Not counted in ``step`` any more, whose weights include two slots then."""
    mix: Mix | None = None
    """Which blocks' saved tensors go to Grace; None where that is off."""
    state_in_hbm: int = 0
    state_in_grace: int = 0

    @property
    def held(self) -> RunFacts:
        """The facts of what stays between steps."""
        return as_held(self.facts)

    @property
    def transient(self) -> int:
        """Of what a step takes for a while, the bytes in HBM: without what is in Grace, or computed again."""
        if self.mix is None:
            return self.step.transient
        choices = zip(self.step.blocks, self.mix.choices, strict=True)
        again = max((block.saved for block, to in choices if to == "recompute"), default=0)
        return max(self.step.transient - self.mix.offloaded - max(self.mix.recomputed - again, 0), 0)

    @property
    def offloaded(self) -> int:
        """Of the same, the bytes in Grace."""
        return self.mix.offloaded if self.mix is not None else 0

    @property
    def copy_of_trained(self) -> int:
        """Bytes of one copy of what is trained, such as its shadows."""
        return self.step.trained * self.held.bytes_per_weight

    @property
    def ema_update(self) -> int:
        """HBM that one takes for a while: shadows of a CPU come over as a whole, and foreach makes a copy of its own.

        With model state in Grace the shadows live there for the device to reach, whatever ``ema_device`` says.
        """
        fetched = not self.held.ema_on_device and not self.facts.state_in_grace
        return self.copy_of_trained * (fetched + self.facts.ema_foreach) if self.facts.ema else 0


def place(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> Placed:
    if machine.one_pool:
        # Refused there: what moves would only be there twice.
        facts = replace(facts, activations="off", weights_in_grace=False, gradients_in_grace=False)
    step = shard(facts, one_step(facts, sizes))
    placed = Placed(facts, sizes, machine, step, optimizer_state(as_held(facts), step))
    placed = _without_what_leaves(placed)
    placed = replace(placed, mix=_mix(placed))
    in_hbm, in_grace = _divide_state(placed)
    return replace(placed, state_in_hbm=in_hbm, state_in_grace=in_grace)


def _without_what_leaves(placed: Placed) -> Placed:
    """Weights of blocks and gradients that the run keeps in Grace, as it divides them after its first step."""
    facts, machine, whole = placed.facts, placed.machine, placed.step.weights
    placed = replace(placed, whole_weights=whole)
    if facts.is_sharded or not machine.has_device:
        return placed
    if facts.gradients_in_grace and facts.full:  # tensors of a LoRA are below what is worth placing
        gone = placed.step.gradients
        placed = replace(placed, step=replace(placed.step, gradients=0), gradients_in_grace=gone)
    step, largest = placed.step, placed.step.largest_block
    if not facts.weights_in_grace or not largest:
        return placed
    state = 0 if facts.state_in_grace else placed.state.bytes
    others = step.outside + step.gradients + placed.transient + state
    automatic = automatic_budget(total=machine.hbm, others=machine.context, peak=others, at_step=others)
    budget = automatic.size if facts.weights_budget is None else facts.weights_budget
    blocks = [largest] * ((whole - step.outside) // largest)
    kept = staying(blocks, budget, SLOTS)
    leaving = (len(blocks) - kept) * largest
    in_hbm = whole - leaving + SLOTS * largest
    if in_hbm >= whole:
        return placed
    return replace(placed, step=replace(step, weights=in_hbm), weights_in_grace=leaving)


def cached(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> int:
    """What a node's unified caches hold: what there is of the kinds we serve, within their allowance."""
    wanted = sizes.data.latents * facts.unified.get("vae", False) + sizes.data.embeds * facts.unified.get("text", False)
    node = machine.grace * machine.sharing(facts.ranks)
    left = max(node - sizes.data.held, 0)
    host = HostMemory(node, left, left, machine.name)
    return min(wanted, caches_allowance(facts.cache_limit, host, single_pool=machine.one_pool))


def _mix(placed: Placed) -> Mix | None:
    facts, step, machine = placed.facts, placed.step, placed.machine
    if facts.activations == "off" or not step.blocks:
        return None
    resident = machine.context + step.weights + step.gradients * facts.gradients_outlive
    resident += 0 if facts.state_in_grace else placed.state.bytes
    others = step.forward - sum(block.saved for block in step.blocks)
    room = max(machine.hbm - resident - max(others, 0) - device_headroom(machine.hbm), 0)
    ranks = machine.sharing(facts.ranks)
    free = _grace_for_model(placed) * ranks
    node = HostMemory(machine.grace * ranks, free, free, machine.name)
    allowed = activations_allowance(facts.activation_limit_gb, node, ranks)
    rates = Rates(machine.d2h, machine.h2d, machine.flops)
    return choose(step.blocks, hbm_room=room, grace_limit=allowed.size, rates=rates)


def _grace_for_model(placed: Placed) -> int:
    """Of one rank; what the node holds once is divided among its ranks."""
    facts, sizes, machine = placed.facts, placed.sizes, placed.machine
    shared = (sizes.data.held + cached(facts, sizes, machine)) // machine.sharing(facts.ranks)
    away = placed.weights_in_grace + placed.gradients_in_grace
    return max(machine.grace - shared - machine.process - away, 0)


def _divide_state(placed: Placed) -> tuple[int, int]:
    """(in HBM, in Grace), as the run's own placement divides it."""
    facts, step, state, machine = placed.facts, placed.step, placed.state, placed.machine
    if not facts.state_in_grace or machine.one_pool or not facts.full:
        return state.bytes, 0  # tensors of a LoRA are below what is worth placing
    held = step.weights + step.gradients
    at_step = held + max(placed.copy_of_trained, placed.ema_update)
    automatic = automatic_budget(
        total=machine.hbm, others=machine.context, peak=held + placed.transient, at_step=at_step
    )
    budget = facts.state_budget if facts.state_budget is not None else automatic.size
    placement = Placement(facts.state_pattern, SMALLEST_PLACED, budget if facts.state_pattern == "gpu_first" else 0)
    whole, rest = divmod(state.bytes, STATE_PIECE)
    return split([*[STATE_PIECE] * whole, *([rest] if rest else [])], placement)
