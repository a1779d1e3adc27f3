"""Watches a run from outside: windows, what is logged, and the moment at which each thing fires.

``RAMP_PROBE`` in the environment asks for more: ``manual=K`` requests a validation and a checkpoint at the K-th
micro-batch, ``hub`` pretends that there is a hub to upload to, ``kill=N`` kills the process after optimizer step N,
``unseen=R`` hides our file in the checkpoint from rank R, whose disk may be another.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import Any


def install(record: dict[str, Any]) -> None:
    wishes = dict(wish.partition("=")[::2] for wish in os.environ.get("RAMP_PROBE", "").split(",") if wish)
    record.update(
        windows=[],
        weights=[],
        logged=[],
        fired=[],
        scheduler_steps=0,
        uploads=[],
        applied_rates=[],
        lines=[],
        ema=[],
        phases=[],
        events=[],
    )
    ours = logging.getLogger("simpletuner_gh200")
    ours.addHandler(Lines(record["lines"]))
    ours.setLevel(logging.DEBUG)
    if "unseen" in wishes and wishes["unseen"] == os.environ.get("RANK"):
        from simpletuner_gh200.seams import checkpoints as checkpoint_state

        checkpoint_state.read_state = lambda folder: {}
    watch = Watch(record, wishes)
    watch.accelerate()
    watch.trainer()
    watch.companions()


class Lines(logging.Handler):
    """What our own logger lets through, as (level, message)."""

    def __init__(self, lines: list[Any]) -> None:
        super().__init__(logging.DEBUG)
        self.lines = lines

    def emit(self, entry: logging.LogRecord) -> None:
        self.lines.append([entry.levelname, entry.getMessage()])


class Watch:
    def __init__(self, record: dict[str, Any], wishes: dict[str, str]) -> None:
        self.record = record
        self.wishes = wishes
        self.micro_batches = 0
        self.in_window = 0
        self.weight = 0.0
        self.asked: set[str] = set()

    def accelerate(self) -> None:
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer
        from accelerate.scheduler import AcceleratedScheduler

        watch = self
        backward, log = Accelerator.backward, Accelerator.log
        opt_step, scheduler_step = AcceleratedOptimizer.step, AcceleratedScheduler.step

        def watched_backward(self: Any, loss: Any, **kwargs: Any) -> Any:
            watch.micro_batches += 1
            watch.in_window += 1
            watch.weight += 1 / self.gradient_accumulation_steps
            return backward(self, loss, **kwargs)

        def watched_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.gradient_state.sync_gradients:
                watch.record["windows"].append(watch.in_window)
                watch.record["weights"].append(watch.weight)
                watch.record["applied_rates"].append(float(self.param_groups[0]["lr"]))
                watch.in_window, watch.weight = 0, 0.0
            return opt_step(self, *args, **kwargs)

        def watched_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.record["scheduler_steps"] += 1
            return scheduler_step(self, *args, **kwargs)

        def watched_log(self: Any, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> Any:
            numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
            watch.record["logged"].append({"step": step, **numbers})
            result = log(self, values, step=step, **kwargs)
            if watch.wishes.get("kill") == str(step):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        Accelerator.backward, Accelerator.log = watched_backward, watched_log
        AcceleratedOptimizer.step, AcceleratedScheduler.step = watched_step, watched_scheduler

    def trainer(self) -> None:
        from simpletuner.helpers.training.trainer import Trainer
        from simpletuner.helpers.training.validation import Validation

        watch = self
        train, save, standard = Trainer.train, Trainer.checkpoint_state_save, Trainer._run_standard_checkpoint
        pipeline, emit = Validation.setup_pipeline, Trainer._emit_event

        def watched_train(self: Any) -> Any:
            if "manual" in watch.wishes:
                self.register_manual_validation_trigger(watch.once("validation"))
                self.register_manual_checkpoint_trigger(watch.once("checkpoint"))
            if "hub" in watch.wishes:
                self.hub_manager = Hub()
            return train(self)

        def watched_save(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.fired("checkpoint", self)
            return save(self, *args, **kwargs)

        def watched_standard(self: Any, *args: Any, upload_to_hub: bool = False, **kwargs: Any) -> Any:
            watch.record["uploads"].append([self.state["global_step"], upload_to_hub])
            kwargs.pop("defer_hub_upload", None)
            return standard(self, *args, upload_to_hub=False, **kwargs)

        def watched_pipeline(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.fired(f"{args[0]} validation", self)
            return pipeline(self, *args, **kwargs)

        def watched_emit(self: Any, event: Any, message_level: str = "info") -> Any:
            if isinstance(event, dict) and isinstance(event.get("progress"), dict):
                metrics = event["progress"].get("metrics") or {}
                watch.record["events"].append([self.state["global_step"], metrics.get("gh200/effective_batch_size")])
            return emit(self, event, message_level)

        Trainer._emit_event = watched_emit
        Trainer.train, Trainer.checkpoint_state_save = watched_train, watched_save
        Trainer._run_standard_checkpoint = watched_standard
        Trainer._schedule_checkpoint_hub_upload = lambda self, path: None
        Validation.setup_pipeline = watched_pipeline

    def companions(self) -> None:
        """EMA and the attention backend's phases, each with the micro-batches of the open window."""
        from simpletuner.helpers.training.attention_backend import AttentionBackendController
        from simpletuner.helpers.training.ema import EMAModel

        watch = self
        ema_step, apply = EMAModel.step, AttentionBackendController.apply

        def watched_ema(self: Any, *args: Any, **kwargs: Any) -> Any:
            watch.record["ema"].append(watch.in_window)
            return ema_step(self, *args, **kwargs)

        def watched_apply(config: Any, phase: Any) -> Any:
            watch.record["phases"].append([str(getattr(phase, "value", phase)), watch.in_window])
            return apply(config, phase)

        EMAModel.step, AttentionBackendController.apply = watched_ema, staticmethod(watched_apply)

    def once(self, what: str) -> Any:
        def consume() -> bool:
            if self.micro_batches >= int(self.wishes["manual"]) and what not in self.asked:
                self.asked.add(what)
                return True
            return False

        return consume

    def fired(self, what: str, owner: Any) -> None:
        step = owner.state["global_step"] if hasattr(owner, "state") else int(owner.global_step)
        self.record["fired"].append(
            {
                "what": what,
                "step": step,
                "micro_batches": self.micro_batches,
                "in_window": self.in_window,
                "closed": bool(owner.accelerator.sync_gradients),
            }
        )


class Hub:
    """A hub that takes everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
