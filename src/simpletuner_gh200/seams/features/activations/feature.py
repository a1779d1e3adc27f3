"""Activations in Grace, in a run: the engine for its device, the moments it acts at, and what it says of itself."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from simpletuner_gh200.config.blocks import ActivationSettings
from simpletuner_gh200.config.environment import local_size
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.allocate import SlabMaker
from simpletuner_gh200.memory.ceilings import activations_allowance, activations_reserve
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.nested import tensors_in
from simpletuner_gh200.model.activations.policy import Comparison, counted
from simpletuner_gh200.model.activations.shape import Shape, summary_of
from simpletuner_gh200.model.refusals import activations_device_refusal, activations_refusal
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.patch import Patch, Patches, wrap_method
from simpletuner_gh200.units import KIB, format_bytes

if TYPE_CHECKING:
    from simpletuner_gh200.model.activations.offload import Offloader
    from simpletuner_gh200.seams.grace import Grace

logger = logging.getLogger("simpletuner_gh200")

COUNTED = ("tensors", "saved", "moved", "brought", "shared", "surprises", "failed")
"""Of the engine's counters, those that the summary has under the same names."""


class ActivationsFeature(Feature):
    name: ClassVar[str] = "activations"

    def __init__(self) -> None:
        self._engine: Offloader | None = None
        self._on_device = False
        self._trial: Comparison | None = None
        """Of ``auto`` against checkpointing, which fits into HBM whatever the trial says."""
        self._where_needed = False
        """``auto`` without checkpointing: no comparison, only shapes that fit into HBM and ones that don't."""
        self._patches = Patches()
        self._checkpointing = False
        self._last: tuple[Hashable, float, bool] | None = None
        self._reported: dict[Hashable, str] = {}

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return {"off": "off", "grace": "requested", "auto": "auto"}[settings.part(ActivationSettings).activations]  # type: ignore[return-value]

    @property
    def _settings(self) -> ActivationSettings:
        return self.settings.part(ActivationSettings)

    # -- moments -----------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        reason = self._against(trainer)
        if reason is None:
            return
        if self._settings.activations == "auto":
            self.runtime.switch_off(self, reason)
            return
        raise FeatureUnavailable(
            f"gh200_optimizations.activations = 'grace' can't work here: {reason}",
            remedy="set activations to 'off', or remove the key; or change what it can't be combined with",
        )

    def _against(self, trainer: Any) -> str | None:
        if trainer.accelerator is None:
            return "there is no accelerator, so nothing is trained"
        driver = detect.current()
        device = trainer.accelerator.device
        caps = driver.capabilities(device.index or 0)
        if self._settings.activations == "auto" and device.type == "cpu":
            return f"there is no GPU whose memory could be relieved ({caps.absence or 'training runs on the CPU'})"
        distributed = str(getattr(trainer.accelerator, "distributed_type", "NO"))
        return activations_refusal(vars(trainer.config), distributed) or activations_device_refusal(device.type, caps)

    def before_train(self, trainer: Any) -> None:
        """Models and optimizer are in place: measure what is left, make the engine, stand beside checkpointing."""
        self._engine = self._make(trainer)
        self._checkpointing = bool(getattr(trainer.config, "gradient_checkpointing", False))
        auto = self._settings.activations == "auto"
        self._where_needed = auto and not self._checkpointing
        self._trial = Comparison() if auto and self._checkpointing else None
        self._switch_checkpointing()

    def _make(self, trainer: Any) -> Offloader:
        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.model.activations.arena import Arena, DeviceRoom, Room
        from simpletuner_gh200.model.activations.offload import Offloader, measure_link

        driver, device = detect.current(), trainer.accelerator.device
        maker = SlabMaker(driver, requested="auto", ordinal=device.index or 0)
        ranks = local_size()
        allowed = activations_allowance(self._settings.activation_limit_gb, host_memory(), ranks)
        logger.info("gh200: up to %s of CPU memory for activations: %s", format_bytes(allowed.size), allowed.why)
        arena = Arena(lambda size: maker.make(size, label="activations"), allowed.size)
        sides, room, rates = lanes(device), Room(), None
        self._on_device = device.type == "cuda"
        if self._on_device:
            reserve = activations_reserve(self._settings.activation_hbm_reserve_gb, maker.caps.device_total)
            grace = self.runtime.grace
            room = DeviceRoom(driver, device, reserve, lambda: _trained(trainer, grace), grace.idle)
            rates = measure_link(driver, arena, maker.ordinal)
        return Offloader(
            sides,
            arena,
            minimum=self._settings.activation_min_tensor_kb * KIB,
            room=room,
            rates=rates,
            grace_limit=allowed.size,
            chosen=self._chosen,
            recognise=self._weights_in_slots,
        )

    def _weights_in_slots(self) -> Any:
        return next((known for one in self.runtime.features_on if (known := one.weights_in_slots)), None)

    def _switch_checkpointing(self) -> None:
        if not self._checkpointing:
            return
        self._patches.install(checkpointing_past(lambda: self._engine))
        logger.info(
            "gh200: gradient checkpointing is on, and switched off for each block whose activations are kept or go to "
            "Grace; blocks are recomputed only where HBM, link and Grace leave no better way"
        )

    def predicting(self, trainer: Any, batch: Mapping[str, Any]) -> AbstractContextManager[object]:
        from simpletuner_gh200.seams.features.activations.batch import shape_of, weights_of

        engine = self._engine
        if engine is None:
            return nullcontext()
        shape = shape_of(batch)
        self._took(shape, steps_after=bool(getattr(trainer.accelerator, "sync_gradients", True)))
        if self._goes_without(engine, shape):
            engine.finish()
            return nullcontext()
        inputs = [tensor for _keys, tensor in tensors_in(batch)]
        return engine.step(shape, lambda: weights_of(trainer, trainer.model, trainer.accelerator), inputs)

    def _goes_without(self, engine: Offloader, shape: Hashable) -> bool:
        """Is this step left as SimpleTuner has it?

        Without checkpointing never before a batch of about its shape is known to fit; that another of that shape has
        longer captions is what the reserve is for."""
        if self._where_needed:
            mix = engine.mix_now(shape)
            return mix is not None and not mix.offloaded
        return self._trial is not None and self._trial.way() == "without"

    def _took(self, shape: Hashable, *, steps_after: bool) -> None:
        """From one forward pass to the next is a step; ``auto`` compares their times.

        One that the optimizer ``steps_after`` is never compared with one that only accumulates."""
        if self._trial is None or self._trial.verdict is not None:
            return
        now = time.perf_counter()
        assert self._engine is not None
        if self._last is not None:
            before, started, counts = self._last
            self._trial.took(before, now - started, counts=counts)
        known = self._engine.shapes.get(shape)
        self._last = ((shape, steps_after), now, known is not None and known.known)
        verdict = self._trial.verdict
        if verdict is not None:
            logger.info("gh200: activations %s: %s", _IN_WORDS[verdict.way], verdict.why)

    def _chosen(self, shape: Hashable, known: Shape) -> None:
        assert known.mix is not None
        reported = f"{known.mix.counts()} {known.mix.fits}"
        if self._reported.get(shape) == reported:
            return
        self._reported[shape] = reported
        chosen = known.block_choices
        blocks = f"; of {len(chosen)} checkpointed blocks {counted(chosen)}" if chosen else ""
        # Without a device there is no HBM, and nothing fits into it.
        level = logging.INFO if known.mix.fits or not self._on_device else logging.WARNING
        logger.log(level, "gh200: activations of batches of %s: %s%s", shape, known.mix.why, blocks)

    def after_train(self, trainer: Any) -> None:
        self._patches.remove()
        if self._engine is not None:
            self._engine.finish()

    def close(self) -> None:
        self._patches.remove()
        if self._engine is not None:
            self._engine.close()

    # -- what it says of itself ----------------------------------------------------------------------------

    def telemetry(self) -> Mapping[str, Any]:
        engine = self._engine
        if engine is None:
            return {}
        return {
            "held_bytes": engine.arena.held,
            "saved_bytes": engine.saved,
            "moved_bytes": engine.moved,
            "fetched_late": engine.late,
            "failed": engine.failed,
            "chosen": self._verdict(),
        }

    def _verdict(self) -> str:
        """What was chosen and what it gained or lost, in a sentence."""
        if self._where_needed:
            assert self._engine is not None
            known = [shape.mix for shape in self._engine.shapes.values() if shape.mix is not None]
            if not known:
                return "still measuring"
            moved = sum(bool(mix.offloaded) for mix in known)
            return f"moved to Grace for {moved} of {len(known)} shapes of batches: steps of the others fit into HBM"
        if self._trial is None:
            where = "Grace" if self._on_device else "CPU memory, standing in for Grace"
            return f"in {where}, as asked"
        verdict = self._trial.verdict
        return f"{_IN_WORDS[verdict.way]}: {verdict.why}" if verdict is not None else "still comparing"

    def summary(self) -> dict[str, Any]:
        engine = self._engine
        if engine is None:
            return {}
        verdict = self._trial.verdict if self._trial is not None else None
        return {
            "mode": self._settings.activations,
            "chosen": self._verdict(),
            "gain": verdict.gain if verdict is not None else None,
            **{name: getattr(engine, name) for name in COUNTED},
            "fetched_late": engine.late,
            "stayed_for_want_of_room": engine.full,
            "slabs": engine.arena.slabs,
            "held_bytes": engine.arena.held,
            "link": vars(engine.rates) if engine.rates is not None else None,
            "shapes": summary_of(engine.shapes),
        }


_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
"""Of checkpointing. Not all are in its signature, and none where SimpleTuner 3 has put its own in front of it."""

_IN_WORDS = {"with": "are moved to Grace", "without": "are left to SimpleTuner"}


def checkpointing_past(engine: Callable[[], Offloader | None]) -> Patch:
    """Each block that calls checkpointing asks the engine first, as long as it is in a step.

    SimpleTuner's models and diffusers' look ``torch.utils.checkpoint.checkpoint`` up when they call it.
    """
    import torch.utils.checkpoint as checkpointing

    parameters = inspect.signature(checkpointing.checkpoint).parameters.values()
    own = {named.name for named in parameters if named.kind is named.KEYWORD_ONLY} | _OPTIONS

    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        running = engine()
        if running is None or running.step_now is None or not args:
            return wrapped(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name in own}
        rest = {name: value for name, value in kwargs.items() if name not in own}
        return running.checkpoint(wrapped, args[0], args[1:], options, rest)

    return wrap_method(checkpointing, "checkpoint", around)


def _trained(trainer: Any, grace: Grace) -> Iterable[Any]:
    """Those with a gradient that takes HBM."""
    groups = getattr(trainer.optimizer, "param_groups", ())
    weights = (weight for group in groups for weight in group["params"])
    return (weight for weight in weights if weight.grad is not None and not grace.holds(weight.grad))


FEATURE = ActivationsFeature
