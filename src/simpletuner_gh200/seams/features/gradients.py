"""Gradients in Grace, in a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import StateSettings, WeightSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.weights import REQUESTS, against, room_left
from simpletuner_gh200.seams.grace import unavailable
from simpletuner_gh200.seams.patch import Patches, wrap_method
from simpletuner_gh200.units import KIB, format_bytes

if TYPE_CHECKING:
    from simpletuner_gh200.model.gradients import PooledGradients

logger = logging.getLogger("simpletuner_gh200")


class GradientsFeature(Feature):
    name = "gradients"

    def __init__(self) -> None:
        self._pooled: PooledGradients | None = None
        self._patches = Patches()
        self._undecided = False
        """``auto``, before a first step has shown what HBM has left."""

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return REQUESTS[settings.part(WeightSettings).gradients]

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        auto = self.settings.part(WeightSettings).gradients == "auto"
        reason = against(self.runtime, trainer, auto=auto)
        if reason is None:
            self._undecided = auto
        elif auto:
            self.runtime.switch_off(self, reason)
        else:
            raise unavailable("gradients = 'grace'", reason)

    def hooks_ready(self, trainer: Any) -> None:
        self._patches.install(wrap_method(trainer.accelerator, "backward", self._backward))

    def before_train(self, trainer: Any) -> None:
        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.model.gradients import PooledGradients

        pool = self.runtime.grace.open(trainer)
        self._pooled = PooledGradients(
            pool,
            lanes(trainer.accelerator.device)[0],
            smallest=self.settings.part(StateSettings).uvm_min_tensor_kb * KIB,
            at_once=trainer.accelerator.num_processes > 1,
        )
        optimizers = (getattr(trainer, name, None) for name in ("optimizer", "sidecar_optimizer"))
        groups = [group for one in optimizers if one is not None for group in one.param_groups]
        self._pooled.install(weight for group in groups for weight in group["params"])

    def _backward(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = wrapped(*args, **kwargs)
        finally:  # also where memory ran out: a copy under way would come after what is put there next
            if self._pooled is not None:
                self._pooled.settle()
        if self._pooled is not None and self._undecided:
            self._undecided = False
            self._decide(self._pooled)
        return result

    def _decide(self, pooled: PooledGradients) -> None:
        """They go back to HBM, and stay there, where it has room for all."""
        _tensors, size = pooled.count()
        room = room_left(self.runtime)
        if size <= room.size:
            logger.info("gh200: gradients stay in HBM, which has room for all: %s", room.why)
            pooled.give_back()
        else:
            logger.info("gh200: %s of gradients live in Grace: %s", format_bytes(size), room.why)

    def after_train(self, trainer: Any) -> None:
        self._patches.remove()
        if self._pooled is not None:
            self._pooled.remove()

    # -- what it tells ---------------------------------------------------------------------------------

    def came_to_grace(self) -> int:
        return self._pooled.count()[1] if self._pooled is not None else 0

    def telemetry(self) -> Mapping[str, Any]:
        tensors, size = self._pooled.count() if self._pooled is not None else (0, 0)
        return {"tensors": tensors, "bytes": size}

    def summary(self) -> dict[str, Any]:
        pooled = self._pooled
        return {
            **self.telemetry(),
            "moved": pooled.moved if pooled is not None else 0,
            "failed": pooled.failed if pooled is not None else 0,
        }


FEATURE = GradientsFeature
