"""From a configuration to a plan: read, trace, calculate. The quick way traces nothing and needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.errors import GH200Error, RunFailed, UsageError
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.plan import text
from simpletuner_gh200.plan.calibration import calibrated
from simpletuner_gh200.plan.changes import SettingChange, changes, cheapest, fastest
from simpletuner_gh200.plan.data import folders_elsewhere
from simpletuner_gh200.plan.deciding import MemoryDecision, decide, decided
from simpletuner_gh200.plan.evaluation import Evaluated, evaluate
from simpletuner_gh200.plan.facts import NOT_FOLLOWED, RunFacts, read_facts, truth
from simpletuner_gh200.plan.machines import RATES, Machine, free_disk, this_machine
from simpletuner_gh200.plan.rows import PHASES, POOLS
from simpletuner_gh200.plan.sizes import ModelSizes, read_sizes
from simpletuner_gh200.plan.starting import Pictures, pictures_of, start_seconds
from simpletuner_gh200.plan.steps import sharding_notes
from simpletuner_gh200.plan.variants import Bucket, OnNodes, buckets, node_of, on_nodes, spread, too_many, usual_flops
from simpletuner_gh200.plan.whole import WholeRun, whole_run
from simpletuner_gh200.telemetry.sink import read_whole, write_whole
from simpletuner_gh200.upstream.option_table import OptionTable

PATIENCE = 0.3
"""Seconds for looking at files in a quick plan; what is not seen by then is not counted, which lowers the bound."""

FILE = Path("gh200") / "plan.json"
"""Below a run's output folder: what was planned, for the report to compare."""


@dataclass(frozen=True)
class Plan:
    machine: Machine
    """Of one rank."""
    sizes: ModelSizes
    evaluated: Evaluated
    asked: RunFacts
    """Before ``memory: "auto"`` has decided."""
    decision: MemoryDecision | None = None
    """Of ``memory: "auto"``."""
    notes: tuple[str, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    """From the largest, which the table is about, down."""
    nodes: tuple[OnNodes, ...] = ()
    """The same run on one node, two and more, with as many ranks on each."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Seconds before the first step of a first start; empty where there was no time to look at files."""
    whole: WholeRun | None = None
    """None where nothing says how long it is."""
    free_disk: int | None = None
    """Of the output folder's disk, as seen from here."""

    @property
    def fits(self) -> bool:
        return self.evaluated.fits

    @cached_property
    def changes(self) -> list[SettingChange]:
        return changes(self.asked, self.sizes, self.machine)

    @property
    def traced_flops(self) -> float | None:
        """Operations of one micro-batch; None where they were not traced, or some blocks are computed again."""
        placed = self.evaluated.placed
        return usual_flops(self.buckets) if placed.step.source == "computed" and placed.mix is None else None

    def to_json(self) -> dict[str, Any]:
        found = self.evaluated
        pools = {}
        for pool in POOLS:
            capacity, used = self.machine.capacity(pool), found.used(pool)
            pools[pool] = {"capacity": capacity, "used": used, "free": None if capacity is None else capacity - used}
        return {
            "fits": self.fits,
            "machine": self.machine.name,
            "pools": pools,
            "phases": {phase: {pool: found.held(phase, pool) for pool in POOLS} for phase in PHASES},
            "bytes": [row.to_json() for row in found.rows],
            "placement": list(self.decision.placement) if self.decision else found.placement(),
            "decision": None if self.decision is None else self.decision.to_json(),
            "buckets": [bucket.to_json() for bucket in self.buckets],
            "step": {**found.step_json(), "flops": self.traced_flops},
            "start": dict(self.start),
            "whole": None if self.whole is None else asdict(self.whole),
            "free_disk": self.free_disk,
            "changes": [change.to_json() for change in self.changes],
            "fastest": best.to_json() if (best := fastest(self.changes)) else None,
            "nodes": [one.to_json() for one in self.nodes],
            "unified": sorted(kind for kind, ours in self.evaluated.facts.unified.items() if ours),
            "rates": self.machine.rate_sources,
            "rate_values": {name: getattr(self.machine, name) for name in RATES},
            "notes": list(self.notes),
            "untraced": dict(self.sizes.errors),
        }


def make_plan(
    training: Training,
    machine: Machine,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    trace: bool = True,
    patience: float | None = None,
    pictures: Pictures | None = None,
) -> Plan:
    """``trace`` False: only what was traced before, without torch. ``patience``: seconds for looking at files.
    ``pictures``: of a data set that is not here.

    ``ranks`` are those of all ``nodes``.
    """
    job = spread(training.job, ranks=ranks, nodes=nodes, most=machine.most_devices if ranks else None)
    crowded = too_many(machine, job)
    if crowded and nodes is not None:
        raise UsageError(crowded, remedy="lower --ranks, name more --nodes, or another --machine")
    facts = read_facts(training, ranks=job.ranks)
    if not facts.family:
        raise UsageError("the configuration names no model_family", remedy="set model_family")
    one = node_of(calibrated(machine), job).of_one_rank(facts.ranks)
    sizes = read_sizes(training, facts, one, trace=trace, patience=patience)
    notes = [*sizes.notes]
    notes += [f"{key}: not followed, a plain step is counted" for key in NOT_FOLLOWED if truth(facts.options.get(key))]
    notes += [*sharding_notes(facts), *([crowded] if crowded else [])]
    if training.assumed:
        notes.append("SimpleTuner's options can't be read here: what is not set is assumed to be at its usual defaults")
    notes += folders_elsewhere(training) if pictures is None else []
    asked = facts
    decision, facts = decide(facts, sizes, one) if facts.memory_auto else (None, facts)
    others = on_nodes(lambda count: decided(read_facts(training, ranks=count), sizes, one), sizes, one, job)
    found = buckets(facts, sizes, one)
    evaluated = evaluate(facts, sizes, one)
    pictures = pictures or (pictures_of(training) if patience is None else None)
    start = start_seconds(training, pictures, sizes, one) if pictures is not None else {}
    disk = one.disk if one.disk is not None else free_disk(str(training.values.get("output_dir") or "."))
    samples = pictures.samples if pictures is not None and not sizes.data.samples else sizes.data.samples
    whole = whole_run(training, facts, evaluated.least, samples)
    return Plan(one, sizes, evaluated, asked, decision, tuple(notes), found, tuple(others), start, whole, disk)


def quick_plan(training: Training, machine: Machine) -> Plan:
    """For those who have no minute: no torch, no tracing, files looked at for a moment only."""
    return make_plan(training, machine, trace=False, patience=PATIENCE)


# -- before a run ------------------------------------------------------------------------------------------


def check_fit(
    training: Training, *, driver: Driver | None = None, root: Path = Path("/"), refuses: bool = True
) -> Plan | None:
    """Before a run on this machine: raises where it can't fit, whatever is assumed; None where nothing can be said.

    Never refuses on a machine without a GPU: there somebody tries things out.
    """
    # The disk is left out: what a run will write may be there already, from its first stretch.
    machine = replace(this_machine(driver=driver, root=root), disk=None)
    if not training.values.get("model_family"):
        return None
    plan = quick_plan(training, machine)
    why = text.refusal(plan) if machine.has_device and refuses else None
    if why is not None:
        change = cheapest(plan.changes)
        more = f"{change.text()}; `gh200 plan` has more" if change else "see `gh200 plan CONFIG` for what would fit"
        raise RunFailed(f"this run does not fit: {why}", remedy=f"{more}; --no-plan starts it anyway")
    return plan


def keep(plan: Plan, output: Path) -> None:
    """Leave the plan with the run; a folder that can't be written is not this file's business."""
    with suppress(OSError):
        write_whole(output / FILE, plan.to_json())


def kept(output: Path) -> Mapping[str, Any] | None:
    return read_whole(output / FILE)


def too_much(values: Mapping[str, Any], machine: Machine) -> str | None:
    """Why a configuration that is in no file yet does not fit, and what would help; None where nothing is known."""
    try:
        plan = quick_plan(unwritten(values), machine)
    except GH200Error:
        return None
    return None if plan.fits else text.too_much(plan, cheapest(plan.changes))


def unwritten(values: Mapping[str, Any], options: OptionTable | None = None) -> Training:
    """A configuration that is in no file yet; its dataset list, neither."""
    flags = [
        f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in values.items()
        if value is not None and key != "data_backend_config"
    ]
    return read_training(Located("cmd", None), {}, flags=flags, options=options)
