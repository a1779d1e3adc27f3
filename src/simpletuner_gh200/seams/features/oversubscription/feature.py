"""Memory beyond HBM for what torch itself allocates: optimizer state and EMA, or all the training thread makes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from simpletuner_gh200.config.blocks import OversubscriptionSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.ceilings import pool_allowance
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.pool.pool import ManagedPool, Pool, RecordingPool, pool_refusal, rehome
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.oversubscription.optimizer import PooledOptimizer
from simpletuner_gh200.units import format_bytes

logger = logging.getLogger("simpletuner_gh200")


class OversubscriptionFeature(Feature):
    name = "oversubscription"

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._optimizers: list[PooledOptimizer] = []
        self._whole_run = contextlib.ExitStack()
        self.landed: Counter[str] = Counter()
        """Bytes in the pool, by what they are; where there is no device, bytes that would be."""
        self.elsewhere: Counter[str] = Counter()

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "asked" if settings.part(OversubscriptionSettings).use_uvm else "off"

    @property
    def _settings(self) -> OversubscriptionSettings:
        return self.settings.part(OversubscriptionSettings)

    def start(self, trainer: Any) -> None:
        """The pool exists before the model does, so that with scope ``all`` nothing is allocated beside it."""
        self._pool = self._open(trainer)
        if self._settings.uvm_scope == "all":
            self._whole_run.enter_context(self._pool.use())

    def _open(self, trainer: Any) -> Pool:
        driver = detect.current()
        ratio, pattern = self._settings.uvm_oversubscription_ratio, self._settings.uvm_access_pattern
        if isinstance(driver, NullDriver):
            self._refuse_other_gpus(driver)
            logger.warning("gh200: use_uvm only keeps a record here: %s", driver.reason)
            return RecordingPool(driver, limit=0, pattern=pattern)
        ordinal = _ordinal(trainer)
        caps = driver.capabilities(ordinal)
        refusal = _refusal(trainer, caps)
        if refusal is not None:
            raise _unavailable(refusal)
        limit = pool_allowance(ratio, caps.device_total)
        logger.info("gh200: managed pool of up to %s (%g x HBM), %s", format_bytes(limit), ratio, pattern)
        return ManagedPool(driver, limit=limit, pattern=pattern, ordinal=ordinal)

    @staticmethod
    def _refuse_other_gpus(driver: NullDriver) -> None:
        import torch

        if torch.cuda.is_available():
            raise _unavailable(driver.reason)

    def before_train(self, trainer: Any) -> None:
        """Everything is resumed: move what exists, and catch what the first steps will make."""
        for attribute in ("optimizer", "sidecar_optimizer"):
            optimizer = getattr(trainer, attribute, None)
            if optimizer is not None:
                self._take_optimizer(optimizer)
        ema = getattr(trainer, "ema_model", None)
        shadow = list(getattr(ema, "shadow_params", ()))
        if shadow:
            self._take("ema", shadow)

    def _take_optimizer(self, optimizer: Any) -> None:
        assert self._pool is not None
        pooled = PooledOptimizer(optimizer, self._pool, lambda born: self._account("optimizer", born))
        existing = list(pooled.state_tensors())
        if existing:
            self._take("optimizer", existing)
        pooled.install()
        self._optimizers.append(pooled)

    def _take(self, what: str, tensors: list[Any]) -> None:
        assert self._pool is not None
        rehome(self._pool, tensors)
        self._account(what, tensors)

    def _account(self, what: str, tensors: Iterable[Any]) -> None:
        """Who holds what: the driver is asked, so that a pool torch did not use can't look used."""
        found = list(tensors)
        if isinstance(self._pool, RecordingPool):
            self._pool.place(what, found)
            self.landed[what] += sum(_size(tensor) for tensor in found)
            return
        assert self._pool is not None
        for tensor in found:
            side = self.landed if self._pool.holds(tensor) else self.elsewhere
            side[what] += _size(tensor)

    def after_train(self, trainer: Any) -> None:
        for pooled in reversed(self._optimizers):
            pooled.uninstall()
        self._optimizers.clear()

    def summary(self) -> dict[str, Any]:
        state = self._pool.state() if self._pool is not None else None
        return {
            "pool": type(self._pool).__name__,
            "scope": self._settings.uvm_scope,
            "pattern": self._settings.uvm_access_pattern,
            "bytes": dict(self.landed),
            "bytes_elsewhere": dict(self.elsewhere),
            "state": vars(state) if state is not None else None,
        }

    def close(self) -> None:
        self._whole_run.close()


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _ordinal(trainer: Any) -> int:
    return int(getattr(trainer.accelerator.device, "index", None) or 0)


def _refusal(trainer: Any, caps: Any) -> str | None:
    import torch

    deepspeed = str(getattr(trainer.accelerator, "distributed_type", "")).upper().endswith("DEEPSPEED")
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    return pool_refusal(torch.__version__, conf, caps, deepspeed=deepspeed)


def _unavailable(reason: str) -> FeatureUnavailable:
    return FeatureUnavailable(
        f"gh200_optimizations.use_uvm can't work here: {reason}", remedy="set use_uvm to false, or remove the key"
    )


FEATURE = OversubscriptionFeature
