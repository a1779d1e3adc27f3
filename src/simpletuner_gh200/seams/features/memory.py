"""``memory: "auto"`` in a run: what was decided before it, a rehearsal of batches that are larger than any before, and
what moves when HBM runs out there.

A rehearsal is the forward and backward pass of a micro-batch with the random numbers that it will have, at the start of
a window, where no gradient counts yet: afterwards gradients are as they were, and the same micro-batch is trained on.
So nothing has to be undone where it fails, and it may be repeated with less in HBM.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import MemorySettings, placed_setting
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.nested import tensors_in
from simpletuner_gh200.model.refusals import weights_refusal
from simpletuner_gh200.seams.decided import ORIGIN
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.weights import room_left

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("simpletuner_gh200")

_FULL = ("out of memory", "_ALLOC_FAILED")
"""Of errors of CUDA and its libraries, which take their own memory past torch's allocator."""


class MemoryFeature(Feature):
    name = "memory"

    def __init__(self) -> None:
        self._largest = 0
        """Bytes of the largest batch that was rehearsed."""
        self._against: str | None = "training has not begun"
        """Why nothing is rehearsed."""
        self._awaited = False
        """Is the next batch one to train on? Evaluations come at the end of a turn."""
        self._rehearsals = 0
        self._moved: list[dict[str, str]] = []
        """In a run, each with the reason."""

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "auto" if settings.part(MemorySettings).memory == "auto" else "off"

    @property
    def _decision(self) -> Mapping[str, Any]:
        return self.runtime.decision

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        settings = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in self._decided().items())
        logger.info("gh200: memory auto: %s: %s", self._decision.get("why"), settings or "nothing is moved")
        for row in self._decision.get("placement", ()):
            logger.debug("gh200: memory auto: %(what)s in %(pool)s, %(bytes)d bytes: %(why)s", row)

    def _decided(self) -> dict[str, Any]:
        """What of the decision is in force."""
        found: dict[str, Any] = self._decision.get("settings", {})
        return {key: value for key, value in found.items() if self.settings.origins.get(key) == ORIGIN}

    def before_train(self, trainer: Any) -> None:
        distributed = str(getattr(trainer.accelerator, "distributed_type", ""))
        self._against = weights_refusal(vars(trainer.config), distributed)
        if self._against is not None:
            logger.info("gh200: memory auto: batches are not rehearsed: %s", self._against)

    def turn_began(self) -> None:
        self._awaited = True

    def batch_prepared(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        if not self._awaited:
            return batch
        self._awaited = False
        size = sum(tensor.nbytes for _keys, tensor in tensors_in(batch))
        if self._against is not None or size <= self._largest or not torch.is_grad_enabled():
            return batch
        several = trainer.accelerator.num_processes > 1
        if self._largest and (several or not trainer.accelerator.sync_gradients):
            return batch  # ranks would have to agree that one has a larger batch; gradients of a window count
        self._largest = size
        self._rehearse(trainer, batch)
        return batch

    def _rehearse(self, trainer: Any, batch: Mapping[str, Any]) -> None:
        """Until it succeeds on every rank, or nothing is left that could move."""
        while True:
            self._rehearsals += 1
            lacks = _first_of_all(_tried(trainer, batch) or self._too_little_left(trainer))
            if lacks is None or _first_of_all(self._move_next(trainer, lacks)) is None:
                return  # where one rank could move something, all try again

    def _too_little_left(self, trainer: Any) -> str | None:
        """What the first step has measured, with the state that its optimizer is to make."""
        grace = self.runtime.grace
        if trainer.accelerator.device.type == "cpu" or grace.refusal(trainer, by_name=False) is not None:
            return None
        grace.open(trainer)
        room = room_left(self.runtime)
        return None if room.size else f"the optimizer's state would not fit: {room.why}"

    def _move_next(self, trainer: Any, lacks: str) -> str | None:
        device = trainer.accelerator.device.type != "cpu"
        for name in self._decision.get("then", ()):
            settings = placed_setting(name, device=device)
            if self.runtime.feature_on(name) or any(map(self.settings.given, settings)):
                continue
            if self.runtime.switch_on(name, settings, ORIGIN):
                logger.warning("gh200: memory auto: moved to Grace: %s (%s)", name, lacks)
                self._moved.append({"what": name, "why": lacks})
                return str(name)
        logger.error("gh200: memory auto: nothing is left that could leave HBM: %s", lacks)
        return None

    # -- what it tells ---------------------------------------------------------------------------------

    def telemetry(self) -> Mapping[str, Any]:
        return {"moved": len(self._moved), "rehearsals": self._rehearsals}

    def summary(self) -> dict[str, Any]:
        return {
            "why": self._decision.get("why"),
            "settings": self._decided(),
            "placement": list(self._decision.get("placement", ())),
            "rehearsals": self._rehearsals,
            "not_rehearsed": self._against,
            "moved": self._moved,
        }


def _tried(trainer: Any, batch: Mapping[str, Any]) -> str | None:
    """Forward and backward of a micro-batch that leave nothing behind; what torch said where memory ran out."""
    import torch

    found = (getattr(trainer.model, name, None) for name in ("model", "controlnet"))
    models = [model for model in found if isinstance(model, torch.nn.Module)]
    optimizers = [trainer.optimizer, getattr(trainer, "sidecar_optimizer", None)]
    groups = [group["params"] for one in optimizers if one is not None for group in one.param_groups]
    found_in = (*groups, *(model.parameters() for model in models))
    trained = {weight for weights in found_in for weight in weights if weight.requires_grad}
    zeros = {weight for weight in trained if weight.grad is not None}
    if torch.cuda.is_initialized():  # the peak of loading and caching is none of training's
        torch.cuda.reset_peak_memory_stats()
    with _same_random_numbers(), _same_statistics(models), ExitStack() as alone:
        for model in models:
            alone.enter_context(_alone(trainer.accelerator, model))
        lacks = _passed(trainer, dict(batch))
    for weight in trained:
        if weight not in zeros:
            weight.grad = None
        elif weight.grad is not None:  # at the start of a window it was zero
            weight.grad.zero_()
    if lacks is not None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return lacks


def _passed(trainer: Any, batch: dict[str, Any]) -> str | None:
    """The pass itself. What it made is gone when it returns, so that it does not count as the next one's peak."""
    import torch

    try:
        prediction = trainer.model_predict(prepared_batch=batch)
        loss = trainer.model.loss(prepared_batch=batch, model_output=prediction, apply_conditioning_mask=True)
        trainer.accelerator.backward(loss)
    except GH200Error:  # a feature has to end the run
        raise
    except Exception as failure:  # noqa: BLE001 - a batch of another kind may train all the same
        said = str(failure).partition("\n")[0]
        if isinstance(failure, torch.OutOfMemoryError) or any(words in said for words in _FULL):
            return said
        logger.warning("gh200: memory auto: a batch could not be rehearsed: %r", failure)
    return None


@contextmanager
def _alone(accelerator: Any, model: torch.nn.Module) -> Iterator[None]:
    """Without a collective, gradients' or buffers': a rank may run out of memory before it gets there."""
    synchronised = getattr(model, "require_forward_param_sync", None)
    if synchronised is not None:  # DistributedDataParallel's, which ``no_sync`` sets only after a forward pass
        vars(model)["require_forward_param_sync"] = False
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        if synchronised is not None:
            vars(model)["require_forward_param_sync"] = synchronised


@contextmanager
def _same_statistics(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """What a forward pass counts in buffers, as BatchNorm does; matrices among them are constants or weights."""
    import torch

    kept = [(buffer, buffer.clone()) for model in models for buffer in model.buffers() if buffer.ndim <= 1]
    try:
        yield
    finally:
        for buffer, before in kept:
            if not buffer.is_meta and not torch.equal(buffer, before):
                buffer.copy_(before)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    import numpy
    import torch

    own, numpys = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(own)
        numpy.random.set_state(numpys)


def _first_of_all(lacks: str | None) -> str | None:
    """What any rank lacks: all move together."""
    from accelerate.utils import gather_object

    return next((found for found in gather_object([lacks]) if found is not None), None)


FEATURE = MemoryFeature
