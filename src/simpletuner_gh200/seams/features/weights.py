"""Weights of the denoiser's blocks in Grace, in a run: who leaves HBM, when they are brought, and what it says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import StateSettings, WeightSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.memory.ceilings import Allowance
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.model.optimizer_table import WeightType, optimizers
from simpletuner_gh200.model.placement import automatic_budget
from simpletuner_gh200.model.refusals import weights_refusal
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.loading import denoisers
from simpletuner_gh200.seams.grace import unavailable
from simpletuner_gh200.seams.patch import Patch, Patches, wrap_method
from simpletuner_gh200.units import KIB, format_bytes, gib_to_bytes

if TYPE_CHECKING:
    import torch

    from simpletuner_gh200.model.blocks import ModelBlock
    from simpletuner_gh200.model.slots import WeightStream
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")

REQUESTS: Mapping[str, Request] = {"hbm": "off", "grace": "requested", "auto": "auto"}


class WeightsFeature(Feature):
    name = "weights"

    def __init__(self) -> None:
        self._stream: WeightStream | None = None
        self._blocks: list[ModelBlock] = []
        """All, those that stay in HBM among them."""
        self._patches = Patches()
        self._budget: str | None = None
        """Why so much stays, once that is known."""

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return REQUESTS[settings.part(WeightSettings).weights]

    @property
    def _settings(self) -> WeightSettings:
        return self.settings.part(WeightSettings)

    @property
    def _smallest(self) -> int:
        return self.settings.part(StateSettings).uvm_min_tensor_kb * KIB

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        self._give_up(against(self.runtime, trainer, auto=self._settings.weights == "auto"))

    def _give_up(self, reason: str | None) -> None:
        if reason is None:
            return
        if self._settings.weights == "auto":
            self.runtime.switch_off(self, reason)
        else:
            raise unavailable("weights = 'grace'", reason)

    def block_loaded(self, trainer: Any, weights: Sequence[torch.nn.Parameter]) -> None:
        """So that HBM never holds more than one block of a model on its way."""
        from simpletuner_gh200.model.tensors import move_to, size_of

        pool = self.runtime.grace.open(trainer)
        for weight in weights:
            if size_of(weight) >= self._smallest and weight.device.type == pool.device and not pool.holds(weight):
                move_to(weight, pool.take(weight.data))

    def hooks_ready(self, trainer: Any) -> None:
        """The model is there, with its adapters; what prepares and resumes it finds its weights at home."""
        import torch

        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.model.blocks import find_blocks, without_plain_weights
        from simpletuner_gh200.model.slots import WeightStream

        models = denoisers(trainer)
        self._blocks = find_blocks(models, self._smallest)
        reason = without_plain_weights(self._blocks)
        if reason is not None:
            self._give_up(reason)
            return
        for block in self._blocks:
            self._take_home(block, trainer)
        self._stream = WeightStream(self._blocks, lanes(trainer.accelerator.device)[1])
        self._stream.install(models)
        self.weights_in_slots = self._stream.recognise
        self._patches.install(
            wrap_method(trainer.accelerator, "backward", self._backward),
            Patch(torch.nn.Parameter, "data", partial(watched, self._stream)),
        )
        size = format_bytes(sum(block.size for block in self._blocks))
        logger.info("gh200: the weights of %d blocks live in Grace, %s", len(self._blocks), size)

    def _take_home(self, block: ModelBlock, trainer: Any) -> None:
        for piece in block.pieces:
            self.block_loaded(trainer, [piece.parameter])
            piece.settle()

    def before_train(self, trainer: Any) -> None:
        """What others have put elsewhere meanwhile comes home again."""
        assert self._stream is not None
        for block in self._stream.blocks:
            self._take_home(block, trainer)

    def predicting(self, trainer: Any, batch: Mapping[str, Any]) -> AbstractContextManager[object]:
        return self._stream.step() if self._stream is not None and self._stream.blocks else nullcontext()

    def _backward(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        stream = self._stream
        if stream is None:
            return wrapped(*args, **kwargs)
        try:
            result = wrapped(*args, **kwargs)
        finally:
            stream.go_home()
        if self._budget is None:
            self._set_budget(stream)
        return result

    def _set_budget(self, stream: WeightStream) -> None:
        """The first forward and backward have shown what training needs, and in which order: the last may come back."""
        from simpletuner_gh200.model.tensors import like

        given = self._settings.weights_hbm_budget_gb
        if given is not None:
            room = Allowance(gib_to_bytes(given), f"weights_hbm_budget_gb {given:g}")
        elif self.runtime.trainer.accelerator.device.type == "cpu":
            room = Allowance(0, "there is no HBM")
        else:
            room = room_left(self.runtime)
            room = Allowance(room.size + stream.slot_bytes, room.why)
        self._budget = room.why
        coming = stream.let_stay(room.size)
        for block in coming:
            for piece in block.pieces:
                piece.move(like(piece.parameter))
        logger.info("gh200: %d of %d blocks stay in HBM: %s", len(coming), len(self._blocks), room.why)

    def after_train(self, trainer: Any) -> None:
        self._patches.remove()
        self.weights_in_slots = None
        if self._stream is not None:
            self._stream.remove()

    # -- what it tells ---------------------------------------------------------------------------------

    def telemetry(self) -> Mapping[str, Any]:
        stream = self._stream
        if stream is None:
            return {}
        return {"streamed": stream.streamed, "late": stream.late, "failed": stream.failed}

    def summary(self) -> dict[str, Any]:
        stream = self._stream
        if stream is None:
            return {"blocks": 0, "bytes": 0, "streamed": 0}
        return {
            "blocks": len(stream.blocks),
            "bytes": sum(piece.size for block in stream.blocks for piece in block.pieces),
            "streamed": stream.streamed,
            "late": stream.late,
            "failed": stream.failed,
            "kept_by_others": stream.kept,
            "slot_bytes": stream.slot_bytes,
            "hbm_blocks": len(self._blocks) - len(stream.blocks),
            "hbm_budget": self._budget,
        }


def watched(stream: WeightStream, original: Any) -> property:
    """``Parameter.data``, of which torch itself would not tell who writes to it."""

    def data(weight: torch.nn.Parameter) -> torch.Tensor:
        found: torch.Tensor = original.__get__(weight)
        stream.shown(weight, found)
        return found

    return property(data, original.__set__)


def against(runtime: Runtime, trainer: Any, *, auto: bool) -> str | None:
    """Why neither weights nor gradients can live in Grace here."""
    if trainer.accelerator is None:
        return "there is no accelerator, so nothing is trained"
    if auto and trainer.accelerator.device.type == "cpu":
        return "there is no GPU whose memory could be relieved"
    distributed = str(getattr(trainer.accelerator, "distributed_type", ""))
    refusal = weights_refusal(vars(trainer.config), distributed)
    return refusal or runtime.grace.refusal(trainer, by_name=not auto)


def room_left(runtime: Runtime) -> Allowance:
    """HBM that the first forward and backward have left, where state that is to be born there has its share."""
    import torch

    trainer, pool = runtime.trainer, runtime.grace.pool
    assert pool is not None
    free, total = detect.current().memory_info(pool.ordinal)
    in_grace, ordinal = pool.share(), pool.ordinal
    came = sum(feature.came_to_grace() for feature in runtime.features_on)
    trained = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    count, size = sum(weight.numel() for weight in trained), sum(weight.nbytes for weight in trained)
    kind: WeightType = "fp32" if any(weight.dtype is torch.float32 for weight in trained) else "bf16"
    facts = optimizers().get(str(getattr(trainer.config, "optimizer", "")))
    each = facts.bytes_per_parameter(kind) if facts is not None else None
    born = 2 * size if each is None else round(each * count)
    there = bool(trainer.optimizer.state)  # from a checkpoint or from steps before: it is in what was measured
    in_hbm = 0 if there or (runtime.settings is not None and runtime.settings.part(StateSettings).use_uvm) else born
    now = max(torch.cuda.memory_allocated(ordinal) - in_grace.allocated, 0)
    return automatic_budget(
        total=total,
        others=max(total - free - max(torch.cuda.memory_reserved(ordinal) - in_grace.reserved, 0), 0),
        peak=max(torch.cuda.max_memory_allocated(ordinal) - in_grace.allocated + came, 0) + in_hbm,
        at_step=now + size + in_hbm,
    )


FEATURE = WeightsFeature
