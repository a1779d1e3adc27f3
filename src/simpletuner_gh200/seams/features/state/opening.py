"""Opening the pool of a run: is it refused, which mechanism is taken, how much may it hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable
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
from simpletuner_gh200.model.optimizer_table import optimizers
from simpletuner_gh200.model.refusals import state_device_refusal, state_refusal, torch_refusal
from simpletuner_gh200.units import format_bytes, gib_to_bytes

if TYPE_CHECKING:
    from simpletuner_gh200.model.catching import HostPool

logger = logging.getLogger("simpletuner_gh200")


def check(settings: StateSettings, trainer: Any, *, by_name: bool) -> Tried | None:
    """At the start of a run: refuse what can't be, before anything is loaded; the mechanism that is taken."""
    if settings.uvm_scope == "all":
        raise FeatureUnavailable(
            "gh200_optimizations.uvm_scope 'all' is not offered: every temporary of a step would live in Grace, which "
            "costs more than it gives, and what a side stream has used would never come back",
            remedy="set uvm_scope to 'optimizer'; for activations there is gh200_optimizations.activations",
        )
    distributed = str(getattr(trainer.accelerator, "distributed_type", ""))
    refusal = state_refusal(vars(trainer.config), distributed) or _streaming_refusal(settings, trainer)
    if refusal is not None:
        raise unavailable(refusal)
    driver = detect.current()
    import torch

    if isinstance(driver, NullDriver):
        if torch.cuda.is_available():
            raise unavailable(driver.reason)
        logger.warning("gh200: host memory stands in for Grace: %s", driver.reason)
        return None
    caps = driver.capabilities(ordinal_of(trainer))
    conf = next(filter(None, map(text, ALLOCATOR)), "")
    refusal = state_device_refusal(caps, by_name=by_name) or torch_refusal(torch.__version__, conf)
    if refusal is not None:
        raise unavailable(refusal)
    return _take(caps)


def _take(caps: Capabilities) -> Tried:
    trials = try_out(caps)
    choice = choose(trials)
    if choice is None:
        raise unavailable("no way to Grace memory works: " + "; ".join(map(str, trials)))
    logger.info("gh200: model state goes to Grace as %s%s", choice.taken, f" ({choice.why})" if choice.why else "")
    return choice.taken


def open_pool(settings: StateSettings, trainer: Any, trial: Tried | None, *, claimed: int) -> GracePool | HostPool:
    """When the data is ready: what caches and datasets took is gone from the host's memory by now."""
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

    mechanism = HostPool.mechanism if trial is None else trial.mechanism
    logger.info("gh200: up to %s of model state in Grace (%s), %s", format_bytes(allowed.size), allowed.why, mechanism)
    if trial is None:
        if settings.oom_reserve_gb:
            logger.warning("gh200: oom_reserve_gb has nothing to do here: there is no device whose memory could end")
        return HostPool(allowed.size, allowed.why)
    floor = state_reserve(host.total)
    limit, why = allowed.size, allowed.why
    pool = GracePool(trial.mechanism, limit=limit, why=why, ordinal=ordinal, floor=floor, node=caps.host_node)
    if settings.oom_reserve_gb:
        pool.open_reserve(gib_to_bytes(settings.oom_reserve_gb))
    return pool


def ordinal_of(trainer: Any) -> int:
    return int(getattr(trainer.accelerator.device, "index", None) or 0)


def _streaming_refusal(settings: StateSettings, trainer: Any) -> str | None:
    if settings.uvm_streaming != "on":
        return None
    why = no_streaming(str(getattr(trainer.config, "optimizer", "")))
    return None if why is None else f'uvm_streaming "on": {why}'


def no_streaming(optimizer: str) -> str | None:
    """Why the step of this optimizer can't be streamed; None where it can."""
    facts = optimizers().get(optimizer)
    if facts is None:
        return f"{optimizer} is not in the table of optimizers that were tried"
    return None if facts.streamable else f"{optimizer} {facts.why_not}"


def trained_and_outliving(trainer: Any, groups: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Bytes of all parameters with a gradient, which a step may need once more for a moment; and of gradients that are
    zeroed after a step, not let go, and so are there in the next forward pass."""
    with_gradient = [weight for group in groups for weight in group["params"] if weight.grad is not None]
    dropped = getattr(trainer.config, "set_grads_to_none", False)
    outliving = 0 if dropped else sum(int(weight.grad.nbytes) for weight in with_gradient)
    return sum(int(weight.nbytes) for weight in with_gradient), outliving


def unavailable(reason: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"gh200_optimizations.use_uvm can't work here: {reason}", remedy="set use_uvm to false, or remove the key"
    )
