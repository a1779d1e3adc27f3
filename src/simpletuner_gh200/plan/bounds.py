"""What an optimizer step takes at least, resource by resource, and which one binds. Pure.

Bounds, not forecasts: each is what its resource alone would need, at a stated rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner_gh200.model.optimizer_table import seconds_in_place, seconds_streamed, streaming_wins
from simpletuner_gh200.plan.facts import ELEMENT, RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Placed
from simpletuner_gh200.plan.sharding import as_held, is_sharded
from simpletuner_gh200.plan.sizes import Sizes


@dataclass(frozen=True)
class Bounds:
    """Seconds per optimizer step of one rank."""

    seconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def step(self) -> float:
        return self.seconds[self.binding]

    @property
    def serial(self) -> float:
        """Computation, and what is known not to hide behind it: the basis on which settings are compared."""
        return self.seconds["compute"] + self.seconds["state"] + self.seconds["waiting"]


def bounds(facts: RunFacts, sizes: Sizes, machine: Machine, placed: Placed) -> Bounds:
    step, windows = placed.step, facts.accumulation
    mix = placed.mix
    moved = mix.offloaded if mix else 0
    samples = windows * facts.batch
    sample_bytes = sizes.latent_bytes + sizes.embed_bytes
    from_slabs = facts.unified.get("vae", False) and facts.unified.get("text", False)
    recomputed = (mix.recompute_seconds if mix else 0.0) * windows
    state = _state_seconds(placed, machine)
    link = max(moved / machine.d2h, moved / machine.h2d) * windows + samples * sample_bytes / machine.h2d + state
    hbm = windows * (3 * step.weights + 2 * (step.saved - moved)) + _passes(placed) * placed.state_in_hbm
    found = {
        "compute": step.flops * windows / machine.flops + recomputed,
        "hbm": hbm / machine.hbm_rate,
        "link": 0.0 if machine.one_pool else link,
        "state": 0.0 if machine.one_pool else state,
        "waiting": (mix.exposed_seconds if mix else 0.0) * windows,
        "disk": 0.0 if from_slabs else samples * sample_bytes / machine.disk_rate,
        "data": samples / (machine.from_slabs if from_slabs else machine.from_files),
        **_between_ranks(facts, placed, machine),
    }
    return Bounds(found)


def _passes(placed: Placed) -> float:
    row = placed.state.row
    return row.reads + row.writes if row is not None else 2.0


def _state_seconds(placed: Placed, machine: Machine) -> float:
    """Of the optimizer step over what lives in Grace, the way the run will take it."""
    size, row = placed.state_in_grace, placed.state.row
    if not size:
        return 0.0
    if row is None or streaming_wins(row, size, machine.h2d, machine.d2h):
        return seconds_streamed(size, machine.h2d, machine.d2h)
    return seconds_in_place(row, size, machine.in_place, machine.in_place)


def _between_ranks(facts: RunFacts, placed: Placed, machine: Machine) -> dict[str, float]:
    """Seconds between GPUs of a node, and between nodes.

    A rank gets from its neighbours what it has not; a node gets over all its ports together what none of its ranks has.
    """
    ranks, beside = facts.ranks, machine.sharing(facts.ranks)
    nodes = -(-ranks // beside)
    moved = _moved_between_ranks(facts, placed)
    within = moved * (beside - 1) / beside / machine.peers
    return {"peers": within, "network": moved * (nodes - 1) / nodes / (beside * machine.network)}


def _moved_between_ranks(facts: RunFacts, placed: Placed) -> float:
    """Bytes that every rank must have seen, of an optimizer step.

    FSDP2 gathers weights twice per micro-batch and scatters gradients once per window; plain ranks reduce gradients.
    """
    step = placed.step
    if not is_sharded(facts):
        return 2 * step.gradients
    sent = ELEMENT[facts.weights] / ELEMENT[as_held(facts).weights]
    gathered = 2 * step.weights * facts.ranks * sent * facts.accumulation
    return gathered + step.trained * facts.ranks * ELEMENT[facts.weights]
