"""What an optimizer step takes at least, resource by resource, and which one binds. Pure.

Bounds, not forecasts: each is what its resource alone would need, at a stated rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner_gh200.model.optimizer_table import seconds_in_place, seconds_streamed, streaming_wins
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Placed
from simpletuner_gh200.plan.sizes import Sizes

SAMPLE_FROM_FILES = 0.7e-3
SAMPLE_FROM_SLABS = 0.06e-3
"""CPU seconds per sample: torch.load of a 512 KB latent, and the same row of a slab (``gh200 bench cache``)."""


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
        "data": samples * (SAMPLE_FROM_SLABS if from_slabs else SAMPLE_FROM_FILES),
        "network": _network(facts, placed, machine),
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


def _network(facts: RunFacts, placed: Placed, machine: Machine) -> float:
    """FSDP2 gathers weights twice and scatters gradients once per micro-batch; plain ranks reduce gradients once."""
    if facts.ranks == 1:
        return 0.0
    others = (facts.ranks - 1) / facts.ranks
    if facts.sharded:
        whole = placed.step.weights * facts.ranks
        gathered = 2 * whole * facts.accumulation
        scattered = placed.step.gradients * facts.ranks * facts.accumulation
        return others * (gathered + scattered) / machine.network
    return 2 * others * placed.step.gradients / machine.network
