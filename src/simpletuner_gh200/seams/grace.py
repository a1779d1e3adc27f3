"""Grace memory of one rank: the way to it that works here, and the one pool that state, weights and gradients share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import StateSettings
from simpletuner_gh200.config.environment import ALLOCATOR, local_size, text
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.ceilings import state_allowance, state_reserve
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import Capabilities, NullDriver
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.numa import read_nodes
from simpletuner_gh200.memory.pool.pool import GracePool
from simpletuner_gh200.memory.pool.probe import Tried, choose, try_out
from simpletuner_gh200.model.refusals import state_device_refusal, torch_refusal
from simpletuner_gh200.units import format_bytes, gib_to_bytes

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.model.catching import HostPool
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")


class Grace:
    """Whoever needs it first has the ways tried, and the pool opened."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tried_out = False
        self._refused: str | None = None
        self.trial: Tried | None = None
        """The way that is taken; None without a device."""
        self.pool: GracePool | HostPool | None = None

    def refusal(self, trainer: Any, *, by_name: bool) -> str | None:
        """At the start of a run: why there is no way to Grace here. ``by_name``: somebody wants it, PCIe or not."""
        driver = detect.current()
        if not isinstance(driver, NullDriver):
            refusal = state_device_refusal(driver.capabilities(ordinal_of(trainer)), by_name=by_name)
            if refusal is not None:
                return refusal
        if not self._tried_out:
            self._tried_out, self._refused = True, self._try(trainer)
        return self._refused

    def _try(self, trainer: Any) -> str | None:
        driver = detect.current()
        import torch

        if isinstance(driver, NullDriver):
            if torch.cuda.is_available():
                return driver.reason
            logger.warning("gh200: host memory stands in for Grace: %s", driver.reason)
            return None
        conf = next(filter(None, map(text, ALLOCATOR)), "")
        refusal = torch_refusal(torch.__version__, conf)
        return refusal or self._take(driver.capabilities(ordinal_of(trainer)))

    def _take(self, caps: Capabilities) -> str | None:
        trials = try_out(caps)
        choice = choose(trials)
        if choice is None:
            return "no way to Grace memory works: " + "; ".join(map(str, trials))
        logger.info("gh200: the model goes to Grace as %s%s", choice.taken, f" ({choice.why})" if choice.why else "")
        self.trial = choice.taken
        return None

    def idle(self) -> int:
        """Bytes that torch counts as cached on the device, and that are the pool's."""
        return self.pool.share().idle if self.pool is not None else 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.pool is not None and self.pool.holds(tensor)

    def open(self, trainer: Any) -> GracePool | HostPool:
        """When the data is ready: what caches and datasets took is gone from the host's memory by now."""
        if self.pool is None:
            assert self._runtime.settings is not None
            claimed = sum(feature.memory_to_come() for feature in self._runtime.features_on)
            self.pool = self._open(self._runtime.settings.part(StateSettings), trainer, claimed=claimed)
        return self.pool

    def _open(self, settings: StateSettings, trainer: Any, *, claimed: int) -> GracePool | HostPool:
        host = host_memory()
        driver, ordinal = detect.current(), ordinal_of(trainer)
        caps = driver.capabilities(ordinal)
        allowed = state_allowance(
            ratio=settings.uvm_oversubscription_ratio,
            device_total=caps.device_total,
            host=host,
            claimed=claimed,
            ranks=local_size(),
            on_node=next((node.free for node in read_nodes() if node.index == caps.host_node), None),
        )
        from simpletuner_gh200.model.catching import HostPool

        trial = self.trial
        mechanism = HostPool.mechanism if trial is None else trial.mechanism
        logger.info(
            "gh200: up to %s of the model in Grace (%s), %s", format_bytes(allowed.size), allowed.why, mechanism
        )
        if trial is None:
            if settings.oom_reserve_gb:
                logger.warning("gh200: oom_reserve_gb has no effect here: no device memory can run out")
            return HostPool(allowed.size, allowed.why)
        floor = state_reserve(host.total)
        limit, why = allowed.size, allowed.why
        pool = GracePool(trial.mechanism, limit=limit, why=why, ordinal=ordinal, floor=floor, node=caps.host_node)
        if settings.oom_reserve_gb:
            pool.open_reserve(gib_to_bytes(settings.oom_reserve_gb))
        return pool


def ordinal_of(trainer: Any) -> int:
    return int(getattr(trainer.accelerator.device, "index", None) or 0)


def unavailable(setting: str, reason: str) -> FeatureUnavailable:
    """``setting``: the key and its value, as somebody wrote it."""
    return FeatureUnavailable(
        f"gh200_optimizations.{setting} can't work here: {reason}",
        remedy=f"remove {setting.partition(' ')[0]} from the configuration, or change what it can't be combined with",
    )
