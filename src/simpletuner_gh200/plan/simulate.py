"""A run's memory over time: the policies that a run uses, on the null driver, with a machine's numbers.

Nothing is decided here. The ramp says how long a window is, the ceilings how much caches, embeds and state may take,
placement what stays in HBM, the valve what is given back; this only asks them in the order in which a run does, and
keeps the account.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import DriverError, FeatureUnavailable
from simpletuner_gh200.memory.ceilings import (
    caches_allowance,
    dataset_allowance,
    embeds_allowance,
    state_allowance,
)
from simpletuner_gh200.memory.driver.interface import Capabilities, MemoryMode
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.placement import choose_kind
from simpletuner_gh200.memory.pressure import PressureValve, Relief
from simpletuner_gh200.plan.changes import Situation
from simpletuner_gh200.plan.facts import RunFacts
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.plan.placing import Placed, place
from simpletuner_gh200.ramp.schedule import GH200GradientRamp
from simpletuner_gh200.ramp.setup import Sizes, ramp_from_settings
from simpletuner_gh200.units import format_bytes

OUT_OF_MEMORY = 2
FILLED_PER_STEP = 0.25
"""Share of the caches that is filled while one optimizer step runs; only the shape of the curve depends on it."""


class SimulatedDriver(NullDriver):
    """The null driver with a machine's capacities: it keeps account of what is allocated, and has nothing to give."""

    name = "simulated"

    def __init__(self, machine: Machine) -> None:
        super().__init__(f"simulated {machine.name}")
        self.machine = machine
        self.held = 0
        self._blocks: dict[int, int] = {}

    def device_count(self) -> int:
        return int(self.machine.has_device)

    def capabilities(self, ordinal: int) -> Capabilities:
        coherent = self.machine.in_place > 100 * 10**9
        return replace(
            super().capabilities(ordinal),
            name=self.machine.title,
            managed=self.machine.has_device,
            host_register=self.machine.has_device,
            pageable_access=coherent,
            integrated=self.machine.one_pool and self.machine.has_device,
            device_total=self.machine.hbm,
            mode=self._mode(coherent),
        )

    def _mode(self, coherent: bool) -> MemoryMode:
        if not self.machine.has_device:
            return "none"
        if self.machine.one_pool:
            return "single pool"
        return "numa" if coherent else "discrete"

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        return self.machine.hbm - self.held, self.machine.hbm

    def alloc_device(self, size: int, ordinal: int) -> int:
        if self.held + size > self.machine.hbm:
            remedy = f"{format_bytes(self.held + size - self.machine.hbm)} more than there is"
            raise DriverError("alloc_device", OUT_OF_MEMORY, "OUT_OF_MEMORY", remedy=remedy)
        self.record("alloc_device", size=size)
        address = len(self._blocks) + 1
        self._blocks[address] = size
        self.held += size
        return address

    def free(self, address: int, ordinal: int) -> None:
        self.held -= self._blocks.pop(address)
        self._blocks[address] = 0
        self.record("free", address=address)


@dataclass(frozen=True)
class Moment:
    """After an optimizer step: what is held, the most that was, and what happened."""

    step: int
    micro_batches: int
    hbm: int
    hbm_peak: int
    grace: int
    events: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "events": list(self.events)}


@dataclass
class Simulation:
    """One run on one rank."""

    facts: RunFacts
    situation: Situation
    ramp: GH200GradientRamp | None = None
    driver: SimulatedDriver = field(init=False)
    _grace: dict[str, int] = field(default_factory=dict)
    _events: list[str] = field(default_factory=list)
    _gradients: int | None = None
    """Where they are on the device."""

    def __post_init__(self) -> None:
        self.driver = SimulatedDriver(self.situation.machine)

    def run(self, steps: int) -> Iterator[Moment]:
        """Ends early, with the reason, where a run would."""
        try:
            self._load()
            micro_batches = 0
            for step in range(steps):
                windows = self.ramp.window(step).accumulation if self.ramp is not None else self.facts.accumulation
                micro_batches += windows
                peak = self._step(step, windows)
                yield self._moment(step + 1, micro_batches, peak)
        except FeatureUnavailable as ended:
            self._events.append(f"the run ends: {ended}")
            yield self._moment(0, 0, self.driver.held)

    def _moment(self, step: int, micro_batches: int, peak: int) -> Moment:
        told, self._events = tuple(self._events), []
        return Moment(step, micro_batches, self.driver.held, peak, sum(self._grace.values()), told)

    @property
    def _sharing(self) -> int:
        return self.situation.machine.sharing(self.facts.ranks)

    def _host(self) -> HostMemory:
        total = self.situation.machine.grace
        left = max(total - sum(self._grace.values()), 0)
        return HostMemory(total=total, free=left, available=left, limit="the machine")

    def _load(self) -> None:
        sizes, constants = self.situation.sizes, self.situation.constants
        caps = self.driver.capabilities(0)
        self._grace["process"] = constants.process
        allowed = dataset_allowance(None, self._host(), single_pool=self.situation.machine.one_pool)
        if sizes.data.held // self._sharing > allowed.size:
            raise FeatureUnavailable(
                f"datasets of {format_bytes(sizes.data.held)} where {allowed.why} allow {format_bytes(allowed.size)}"
            )
        self._grace["datasets"] = sizes.data.held // self._sharing
        if any(self.facts.unified.values()):
            kind = choose_kind("auto", caps, ranks=self.facts.ranks)
            self._events.append(f"caches in {kind.kind} memory: {kind.reason}")
        placed = self._placed(1)
        if self.situation.machine.has_device:
            self._take("context", constants.context)
        self._take("weights", placed.step.weights)

    def _take(self, what: str, size: int) -> int | None:
        """On the device, or in the one pool; returns what to free."""
        if self.situation.machine.one_pool:
            self._grace[what] = size
            if self._host().available == 0:
                raise FeatureUnavailable(f"{what}: no memory is left for {format_bytes(size)}")
            return None
        free, _total = self.driver.memory_info(0)
        try:
            return self.driver.alloc_device(size, 0)
        except DriverError:
            raise FeatureUnavailable(
                f"{what} of {format_bytes(size)}, where {format_bytes(free)} of HBM are left"
            ) from None

    def _placed(self, windows: int) -> Placed:
        facts = replace(self.facts, accumulation=windows)
        return place(facts, self.situation.sizes, self.situation.machine, self.situation.constants)

    def _step(self, step: int, windows: int) -> int:
        placed = self._placed(windows)
        self._fill(step)
        if step == 0 or self.facts.drops_gradients:
            self._gradients = self._take("gradients", placed.step.gradients)
        moved = placed.mix.offloaded if placed.mix else 0
        transient = self._take("activations", placed.transient)
        if moved:
            self._grace["activations"] = moved
        peak = self.driver.held
        self._give_back("activations", transient)
        if step == 0:
            self._make_state(placed)
        if self.facts.drops_gradients:
            self._give_back("gradients", self._gradients)
        self._relieve(step)
        return max(peak, self.driver.held)

    def _give_back(self, what: str, address: int | None) -> None:
        if address is None:
            self._grace.pop(what, None)
        else:
            self.driver.free(address, 0)

    def _make_state(self, placed: Placed) -> None:
        facts, machine = self.facts, self.situation.machine
        if placed.state_in_grace:
            allowed = state_allowance(
                ratio=facts.state_ratio, device_total=machine.hbm, host=self._host(), claimed=0, ranks=1
            )
            if placed.state_in_grace > allowed.size:
                raise FeatureUnavailable(
                    f"optimizer state of {format_bytes(placed.state_in_grace)} in Grace, {format_bytes(allowed.size)} "
                    f"allowed: {allowed.why}"
                )
            self._grace["optimizer"] = placed.state_in_grace
            self._events.append(f"optimizer state: {format_bytes(placed.state_in_grace)} in Grace")
        self._take("optimizer state", placed.state_in_hbm)
        if facts.hbm_embeds:
            free, _total = self.driver.memory_info(0)
            embeds = embeds_allowance(self.driver.capabilities(0), free, facts.hbm_embeds)
            self._take("embeds", embeds.size)
            self._events.append(f"embeds in HBM: {format_bytes(embeds.size)}, {embeds.why}")

    def _fill(self, step: int) -> None:
        """Caches fill while training runs, within their allowance."""
        data, unified = self.situation.sizes.data, self.facts.unified
        wanted = data.latents * unified.get("vae", False) + data.embeds * unified.get("text", False)
        wanted //= self._sharing
        held = self._grace.get("caches", 0)
        host = self._host()
        host = replace(host, available=host.available + held)
        allowed = caches_allowance(self.facts.cache_limit, host, single_pool=self.situation.machine.one_pool)
        if step == 0 and wanted > allowed:
            self._events.append(f"caches: {format_bytes(allowed)} of {format_bytes(wanted)} will be held")
        self._grace["caches"] = min(int(wanted * FILLED_PER_STEP * (step + 1)), wanted, max(allowed, held))

    def _relieve(self, step: int) -> None:
        """The valve of a run, told what is left; what it gives back is gone."""
        host = self._host()
        valve = PressureValve([Relief("caches", lambda: self._grace.get("caches", 0), lambda: None)])
        given = valve.observe(host.available, host.total, float(step))
        if given is not None and given.size:
            self._grace["caches"] = 0
            self.facts = replace(self.facts, unified={})
            self._events.append(f"{given.name} given back: only {format_bytes(host.available)} were left")


def simulate(training: Training, facts: RunFacts, situation: Situation, steps: int) -> list[Moment]:
    """The first ``steps`` optimizer steps."""
    settings = training.raise_if_bad()
    ramp = settings.part(RampSettings)
    schedule = None
    if ramp.enable_batch_size_rampup:
        schedule = ramp_from_settings(ramp, Sizes(facts.batch, facts.ranks, facts.accumulation, steps))
    return list(Simulation(facts, situation, schedule).run(steps))
