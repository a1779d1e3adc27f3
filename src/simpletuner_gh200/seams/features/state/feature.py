"""Model state in Grace: optimizer state and EMA are caught as they are made, and stay where they are put."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import StateSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.pool.probe import Tried
from simpletuner_gh200.model.optimizer_table import optimizers, streaming_wins
from simpletuner_gh200.model.placement import Placement, automatic_budget
from simpletuner_gh200.seams.decided import ORIGIN
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.state.opening import (
    check,
    no_streaming,
    trained_and_outliving,
)
from simpletuner_gh200.seams.patch import Patches, wrap_method
from simpletuner_gh200.units import KIB, format_bytes, gib_to_bytes

# These import torch, and what a feature asks for is known before a run, too.
if TYPE_CHECKING:
    from simpletuner_gh200.memory.pool.pool import GracePool, PoolState
    from simpletuner_gh200.model.catching import CaughtOptimizer, CaughtShadow, HostPool, Keeper, Tally
    from simpletuner_gh200.model.streaming import StreamedOptimizer

logger = logging.getLogger("simpletuner_gh200")

USE_UVM = "gh200_optimizations.use_uvm"
ACCESS_PATTERN = "gh200_optimizations.uvm_access_pattern"


class StateFeature(Feature):
    name = "state"

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._optimizers: list[CaughtOptimizer] = []
        self._streamed: dict[str, StreamedOptimizer | None] = {}
        """By optimizer, once it was decided; None: not streamed."""
        self._shadow: CaughtShadow | None = None
        self._patches = Patches()
        self._shadow_patches = Patches()
        self._pool_at_end: PoolState | None = None
        self._budget: str | None = None
        """Why gpu_first keeps so much in HBM, once that is known."""
        self._streaming = "not decided"

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        if not settings.part(StateSettings).use_uvm:
            return "off"
        return "auto" if settings.origins[USE_UVM] == ORIGIN else "requested"

    @property
    def _settings(self) -> StateSettings:
        return self.settings.part(StateSettings)

    @property
    def _trial(self) -> Tried | None:
        return self.runtime.grace.trial

    @property
    def _pool(self) -> GracePool | HostPool | None:
        return self.runtime.grace.pool

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        try:
            check(self._settings, self.runtime.grace, trainer, by_name=self.settings.given(ACCESS_PATTERN))
        except FeatureUnavailable as refused:
            if self.request(self.settings, {}) == "requested":
                raise
            self.runtime.switch_off(self, str(refused))
            return
        config = trainer.config
        if getattr(config, "use_ema", False) and getattr(config, "ema_device", None) != "accelerator":
            if getattr(config, "ema_cpu_only", False):
                logger.info("gh200: ema_cpu_only keeps EMA and its update on the CPU; it is left alone")
            else:
                # Or every update would take all shadows to HBM and back.
                config.ema_device = "accelerator"

    def _open(self, trainer: Any) -> GracePool | HostPool:
        pool = self.runtime.grace.open(trainer)
        if self._keeper is None:
            from simpletuner_gh200.model.catching import Keeper

            given, pattern = self._settings.uvm_hbm_budget_gb, self._settings.uvm_access_pattern
            self._keeper = Keeper(pool, Placement(pattern, self._smallest, gib_to_bytes(given or 0)))
            if given is not None or self._trial is None or pattern != "gpu_first":
                self._budget = "uvm_hbm_budget_gb" if given is not None else "no HBM share"
        return pool

    @property
    def _smallest(self) -> int:
        return self._settings.uvm_min_tensor_kb * KIB

    @contextlib.contextmanager
    def making_ema(self, trainer: Any) -> Iterator[None]:
        """Shadows are cloned where they stay. Newer releases make them twice: those of the first time can go."""
        if self._shadow is not None:
            self._shadow_patches.remove()
            self._shadow = trainer.ema_model = None
            gc.collect()  # a patch and what it wraps hold each other
        with self._open(trainer).use():
            yield
        ema = getattr(trainer, "ema_model", None)
        if ema is None or getattr(trainer.config, "ema_cpu_only", False):
            return
        from simpletuner_gh200.model.catching import CaughtShadow, Keeper

        self._shadow = CaughtShadow(ema, Keeper(self._open(trainer), Placement("cpu_first", self._smallest)))
        self._shadow_patches.install(wrap_method(ema, "to", self._shadow_moves))
        self._shadow.sweep()

    def _shadow_moves(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        assert self._pool is not None and self._shadow is not None
        with self._pool.use():
            result = wrapped(*args, **kwargs)
        self._shadow.sweep()
        return result

    def hooks_ready(self, trainer: Any) -> None:
        """The optimizer exists; what it loads and makes from now on is caught."""
        pool = self._open(trainer)
        self._adopt(trainer)
        accelerator = trainer.accelerator
        if accelerator.num_processes > 1:
            self._patches.install(wrap_method(accelerator, "load_state", _load_on_the_cpu))
        if pool.reserve is not None:
            self._patches.install(wrap_method(accelerator, "backward", self._before_backward))

    def _adopt(self, trainer: Any) -> None:
        from simpletuner_gh200.model.catching import CaughtOptimizer

        assert self._keeper is not None
        known = {id(caught.optimizer) for caught in self._optimizers}
        for name in ("optimizer", "sidecar_optimizer"):
            found = getattr(trainer, name, None)
            if found is None or id(getattr(found, "optimizer", found)) in known:
                continue
            caught = CaughtOptimizer(found, self._keeper, name)
            self._optimizers.append(caught)
            caught.sweep()
            self._patches.install(
                wrap_method(caught.optimizer, "step", _calling(self._step, caught)),
                wrap_method(caught.optimizer, "load_state_dict", _calling(self._load, caught)),
            )

    def before_train(self, trainer: Any) -> None:
        """Everything is prepared and resumed: what others put elsewhere meanwhile is moved, and counted."""
        self._adopt(trainer)
        for part in self._parts():
            part.sweep()
        if self._trial is not None and self._shadow is not None and self._shadow.temporaries:
            size = format_bytes(self._shadow.temporaries)
            logger.warning(
                "gh200: the EMA update needs %s of HBM for a moment; ema_foreach_disable avoids it, with results that "
                "differ in rounding",
                size,
            )

    def after_train(self, trainer: Any) -> None:
        for part in self._parts():
            part.sweep()
        # With the tally, before SimpleTuner lets go of its optimizer.
        self._pool_at_end = self._pool.state() if self._pool is not None else None
        self._patches.remove()
        self._shadow_patches.remove()

    # -- the optimizer's own calls -------------------------------------------------------------------------

    def _load(self, caught: CaughtOptimizer, wrapped: Any, args: Any, kwargs: Any) -> Any:
        """Resuming: what is loaded goes to its home at once, so that a run that fitted also resumes."""
        return caught.load(wrapped, *args, **kwargs)

    def _step(self, caught: CaughtOptimizer, wrapped: Any, args: Any, kwargs: Any) -> Any:
        if self._budget is None:
            self._set_budget()
        taken: CaughtOptimizer | StreamedOptimizer = self._streaming_of(caught) or caught
        result = taken.step(wrapped, *args, **kwargs)
        self._look_at_reserve()
        return result

    def _set_budget(self) -> None:
        """Before the first optimizer step: the first forward and backward have shown what training needs."""
        import torch

        assert self._pool is not None and self._keeper is not None
        ordinal, in_grace = self._pool.ordinal, self._pool.share()
        free, total = detect.current().memory_info(ordinal)
        of_torch = max(torch.cuda.memory_reserved(ordinal) - in_grace.reserved, 0)
        groups = [group for caught in self._optimizers for group in caught.optimizer.param_groups]
        at_once, outliving = trained_and_outliving(self.runtime.trainer, groups)
        came = sum(feature.came_to_grace() for feature in self.runtime.features_on)
        shadows = self._shadow.temporaries if self._shadow is not None else 0
        allowed = automatic_budget(
            total=total,
            others=max(total - free - of_torch, 0),
            peak=max(torch.cuda.max_memory_allocated(ordinal) - in_grace.allocated + came, 0),
            at_step=max(torch.cuda.memory_allocated(ordinal) - in_grace.allocated, 0) + max(at_once, shadows),
            outliving=outliving,
        )
        self._keeper.placement = replace(self._keeper.placement, budget=allowed.size)
        self._budget = allowed.why
        logger.info("gh200: up to %s of optimizer state stays in HBM (%s)", format_bytes(allowed.size), allowed.why)
        for caught in self._optimizers:
            caught.promote()

    def _streaming_of(self, caught: CaughtOptimizer) -> StreamedOptimizer | None:
        """Decided when there is state in the pool, which is after the first step or the resume."""
        if caught.name not in self._streamed and caught.tally.bytes:
            self._streamed[caught.name] = self._decide_streaming(caught)
            logger.info("gh200: the step of %s is %s", caught.name, self._streaming)
        return self._streamed.get(caught.name)

    def _decide_streaming(self, caught: CaughtOptimizer) -> StreamedOptimizer | None:
        import torch

        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.model.streaming import StreamedOptimizer

        assert self._pool is not None
        requested, trial = self._settings.uvm_streaming, self._trial
        optimizer = str(getattr(self.runtime.trainer.config, "optimizer", ""))
        why = "uvm_streaming is off" if requested == "off" else no_streaming(optimizer)
        if why is None and requested == "auto":
            why = "no device was measured" if trial is None else self._no_gain(caught, optimizer, trial)
        if why is not None:
            self._streaming = f"taken in place: {why}"
            return None
        self._streaming = "streamed through HBM"
        return StreamedOptimizer(caught, lanes(torch.device(self._pool.device, self._pool.ordinal)))

    @staticmethod
    def _no_gain(caught: CaughtOptimizer, optimizer: str, trial: Tried) -> str | None:
        facts = optimizers()[optimizer]
        if any(group.get("fused") for group in caught.optimizer.param_groups):
            facts = replace(facts, reads=1.0, writes=1.0)  # one kernel, which passes over its state once
        if streaming_wins(facts, caught.tally.bytes, trial.read, trial.write):
            return None
        return f"{facts.reads:g} reads and {facts.writes:g} writes of its state are no slower at the measured rates"

    def _before_backward(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Activations are at their most: the moment to see whether the reserve had to help."""
        self._look_at_reserve()
        return wrapped(*args, **kwargs)

    def _look_at_reserve(self) -> int:
        """Bytes of it in use."""
        return self._pool.reserve.look() if self._pool is not None and self._pool.reserve is not None else 0

    # -- what it tells ---------------------------------------------------------------------------------

    def _parts(self) -> list[CaughtOptimizer | CaughtShadow]:
        return [*self._optimizers, *([] if self._shadow is None else [self._shadow])]

    def _tally(self) -> Tally:
        from simpletuner_gh200.model.catching import Tally

        total = Tally()
        for part in self._parts():
            total.add(part.tally)
        return total

    def telemetry(self) -> Mapping[str, Any]:
        tally, used = self._tally(), self._look_at_reserve()
        found: dict[str, Any] = {"tensors": tally.tensors, "bytes": tally.bytes, "hbm_bytes": tally.hbm_bytes}
        if self._pool is not None and (reserve := self._pool.reserve) is not None:
            found["oom_reserve"] = {"used": used, "most": reserve.most, "times": reserve.times}
        return found

    def summary(self) -> dict[str, Any]:
        pool, trial, tally = self._pool, self._trial, self._tally()
        reserve = pool.reserve if pool is not None else None
        return {
            "tensors": tally.tensors,
            "bytes": tally.bytes,
            "mechanism": pool.mechanism if pool is not None else None,
            "pattern": self._settings.uvm_access_pattern,
            "scope": self._settings.uvm_scope,
            "of": {part.name: vars(part.tally) for part in self._parts()},
            "hbm_budget": {"bytes": self._keeper.placement.budget, "why": self._budget} if self._keeper else None,
            "streaming": self._streaming,
            "streamed_steps": sum(streamed.steps for streamed in self._streamed.values() if streamed is not None),
            "gb_per_s": {"read": trial.read / 1e9, "write": trial.write / 1e9} if trial is not None else None,
            "oom_reserve": {"held": reserve.held, "most": reserve.most, "times": reserve.times} if reserve else None,
            "pool": vars(self._pool_at_end or pool.state()) if pool is not None else None,
        }


def _calling(method: Any, caught: CaughtOptimizer) -> Any:
    """``method`` in the shape of a wrapper."""

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return method(caught, wrapped, args, kwargs)

    return call


def _load_on_the_cpu(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """With several ranks accelerate loads a checkpoint onto the device, beside everything that is there already."""
    kwargs.setdefault("map_location", "cpu")
    return wrapped(*args, **kwargs)


FEATURE = StateFeature
