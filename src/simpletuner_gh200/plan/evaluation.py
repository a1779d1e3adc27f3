"""A run on a machine, weighed: its table of bytes, whether that fits, and what a step takes at least. Pure.

Bounds, not forecasts: each is what its resource alone would need for an optimizer step of one rank, at a stated rate.
To add one, add a function to ``BOUNDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.model.optimizer_table import seconds_in_place, seconds_streamed, streaming_wins
from simpletuner_gh200.plan.facts import ELEMENT, RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Placed, place
from simpletuner_gh200.plan.rows import PHASES, POOLS, Phase, Pool, Row, rows_of
from simpletuner_gh200.plan.sizes import ModelSizes


@dataclass(frozen=True)
class Evaluated:
    """What the policies decided, the bytes that follow from it, and seconds per optimizer step of one rank."""

    placed: Placed
    rows: tuple[Row, ...]
    seconds: dict[str, float]

    @property
    def facts(self) -> RunFacts:
        return self.placed.facts

    # -- bytes -------------------------------------------------------------------------------------------------

    def of(self, phase: Phase, pool: Pool) -> Iterator[Row]:
        return (row for row in self.rows if row.pool == pool and row.phase in (None, phase))

    def held(self, phase: Phase, pool: Pool, *, certain: bool = False) -> int:
        """Bytes in a pool during a phase; ``certain``: without what is assumed."""
        return sum(row.bytes for row in self.of(phase, pool) if row.certain or not certain)

    def placement(self) -> list[dict[str, Any]]:
        """Where each thing is while it trains, the largest first."""
        usual = {"hbm": "as SimpleTuner keeps it", "grace": "as configured"}
        pools: tuple[Pool, Pool] = ("hbm", "grace")
        rows = sorted((row for pool in pools for row in self.of("train", pool)), key=lambda row: (-row.bytes, row.what))
        return [
            {"what": row.what, "pool": row.pool, "bytes": row.bytes, "why": row.note or usual[row.pool]} for row in rows
        ]

    def used(self, pool: Pool, *, certain: bool = False) -> int:
        return max(self.held(phase, pool, certain=certain) for phase in PHASES)

    def worst_phase(self, pool: Pool) -> Phase:
        return max(PHASES, key=lambda phase: self.held(phase, pool))

    def overflow(self, *, certain: bool = False) -> dict[Pool, int]:
        """Pool -> bytes beyond its capacity; ``certain``: without anything assumed."""
        rooms = {pool: self.placed.machine.capacity(pool) for pool in POOLS}
        over = {pool: self.used(pool, certain=certain) - room for pool, room in rooms.items() if room is not None}
        return {pool: size for pool, size in over.items() if size > 0}

    @property
    def fits(self) -> bool:
        return not self.overflow()

    # -- time --------------------------------------------------------------------------------------------------

    @property
    def binding(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def least(self) -> float:
        """Seconds of a step at least."""
        return self.seconds[self.binding]

    @property
    def serial(self) -> float:
        """Computation, and what is known not to hide behind it: the basis on which settings are compared."""
        return self.seconds["compute"] + self.seconds["state"] + self.seconds["waiting"]

    def step_json(self) -> dict[str, Any]:
        return {"bounds": self.seconds, "binding": self.binding}


def evaluate(facts: RunFacts, sizes: ModelSizes, machine: Machine) -> Evaluated:
    placed = place(facts, sizes, machine)
    return Evaluated(placed, rows_of(placed), {bound.__name__[1:]: bound(placed) for bound in BOUNDS})


def _compute(run: Placed) -> float:
    recomputed = run.mix.recompute_seconds if run.mix else 0.0
    return run.facts.accumulation * (run.step.flops / run.machine.flops + recomputed)


def _hbm(run: Placed) -> float:
    per_batch = 3 * run.whole_weights + 2 * (run.step.saved - run.offloaded)
    known = run.state.optimizer
    passes = known.reads + known.writes if known is not None else 2.0
    return (run.facts.accumulation * per_batch + passes * run.state_in_hbm) / run.machine.hbm_rate


def _link(run: Placed) -> float:
    if run.machine.one_pool:
        return 0.0
    moved = run.offloaded * max(1 / run.machine.d2h, 1 / run.machine.h2d)
    moved += _weights_moved(run)
    return run.facts.accumulation * moved + _bytes_of_samples(run) / run.machine.h2d + _state(run)


def _weights_moved(run: Placed) -> float:
    """Of a micro-batch: blocks come ahead of forward and of backward; gradients go when they are there."""
    return max(2 * run.weights_in_grace / run.machine.h2d, run.gradients_in_grace / run.machine.d2h)


def _state(run: Placed) -> float:
    """Of the optimizer step over what lives in Grace, the way the run will take it."""
    size, known, machine = run.state_in_grace, run.state.optimizer, run.machine
    others = run.gradients_in_grace + run.weights_in_grace * run.facts.full
    if machine.one_pool or not size + others:
        return 0.0
    passes = known.reads if known is not None else 3.0  # over weights and gradients, too, where no step is streamed
    if not size:
        return passes * others / machine.in_place
    if known is None or streaming_wins(known, size, machine.h2d, machine.d2h):
        return seconds_streamed(size + others, machine.h2d, machine.d2h)
    return seconds_in_place(known, size, machine.in_place, machine.in_place) + passes * others / machine.in_place


def _waiting(run: Placed) -> float:
    late = max(_weights_moved(run) - run.step.flops / run.machine.flops, 0.0) if run.step.flops else 0.0
    return ((run.mix.exposed_seconds if run.mix else 0.0) + late) * run.facts.accumulation


def _disk(run: Placed) -> float:
    return 0.0 if _from_slabs(run.facts) else _bytes_of_samples(run) / run.machine.disk_rate


def _data(run: Placed) -> float:
    rate = run.machine.from_slabs if _from_slabs(run.facts) else run.machine.from_files
    return run.facts.accumulation * run.facts.batch / rate


def _peers(run: Placed) -> float:
    """Between GPUs of a node: a rank gets from its neighbours what it has not."""
    ranks = run.machine.sharing(run.facts.ranks)
    return _between_ranks(run) * (ranks - 1) / ranks / run.machine.peers


def _network(run: Placed) -> float:
    """A node gets over all its ports together what none of its ranks has."""
    ranks = run.machine.sharing(run.facts.ranks)
    nodes = -(-run.facts.ranks // ranks)
    return _between_ranks(run) * (nodes - 1) / nodes / (ranks * run.machine.network)


def _between_ranks(run: Placed) -> float:
    """Bytes that every rank must have seen, of an optimizer step.

    FSDP2 gathers weights twice per micro-batch and scatters gradients once per window; plain ranks reduce gradients.
    """
    facts, step = run.facts, run.step
    if not facts.is_sharded:
        return 2 * step.gradients
    sent = facts.bytes_per_weight / ELEMENT[run.held.weights]
    gathered = 2 * step.weights * facts.ranks * sent * facts.accumulation
    return gathered + step.trained * facts.ranks * facts.bytes_per_weight


def _bytes_of_samples(run: Placed) -> int:
    return run.facts.accumulation * run.facts.batch * (run.sizes.latent_bytes + run.sizes.embed_bytes)


def _from_slabs(facts: RunFacts) -> bool:
    return facts.unified.get("vae", False) and facts.unified.get("text", False)


BOUNDS: tuple[Callable[[Placed], float], ...] = (
    *(_compute, _hbm, _link, _state, _waiting),
    *(_disk, _data, _peers, _network),
)
"""Each is named after its resource."""
