"""The trainer's methods, in the order of a run: each tells the features that a moment has come."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.seams.checkpoints import resume_from_whole
from simpletuner_gh200.seams.loop import LoopWatch
from simpletuner_gh200.seams.patch import wrap_method
from simpletuner_gh200.seams.preemption import TRY_AGAIN, CheckpointWritten, Preemption
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import wrapping


def _parse_arguments(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The configuration was read and the accelerator exists; settings are resolved and features start."""
    runtime.phases.end("import")
    _speak_again()
    result = wrapped(*args, **kwargs)
    try:
        runtime.configure_from(instance)
    except GH200Error as failure:
        runtime.outcome.fail(failure)
        raise
    runtime.outcome.output_dir = str(getattr(instance.config, "output_dir", "") or "")
    runtime.forget_earlier_summary()
    extend_log(getattr(instance, "accelerator", None), runtime)
    runtime.call("start", instance)
    runtime.phases.end("configure")
    runtime.enters("loading the encoders")
    return result


def _speak_again() -> None:
    """Releases up to 3.x configure logging so that every logger made before it is silenced, ours among them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "simpletuner_gh200":
            logger.disabled = False


def extend_log(accelerator: Any, runtime: Runtime) -> None:
    """Features add to what this run's accelerator logs; without one that does, nothing is wrapped."""
    if accelerator is None or not (runtime.moment("metrics") or runtime.moment("step_logged")):
        return

    def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        values = args[0] if args else kwargs["values"]
        step = args[1] if len(args) > 1 else kwargs.get("step")
        runtime.call("metrics", values)
        runtime.call("step_logged", values, step)
        return wrapped(*args, **kwargs)

    runtime.patches.remove()  # those of a run before in this process, so that its objects can go
    runtime.patches.install(wrap_method(accelerator, "log", before))


def _init_data_backend(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Datasets and caches are made here."""
    runtime.phases.end("models")
    runtime.enters("caching")
    result = wrapped(*args, **kwargs)
    runtime.enters("filling the caches")
    runtime.call("data_ready", instance)
    runtime.phases.end("data")
    runtime.enters("loading the model")
    return result


def _init_hooks(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream registers its save and load hooks; ours follow."""
    result = wrapped(*args, **kwargs)
    runtime.call("hooks_ready", instance)
    return result


def _init_ema_model(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream clones the trained weights, where EMA is on."""
    with ExitStack() as making:
        for moment in runtime.moment("making_ema"):
            making.enter_context(moment(instance))
        return wrapped(*args, **kwargs)


def _init_resume_checkpoint(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    resume_from_whole(instance, runtime)
    return wrapped(*args, **kwargs)


def _train(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The loop as a whole. Its outcome is recorded, because older releases exit 0 after a failure."""
    runtime.phases.end("model load")
    outcome = runtime.outcome
    outcome.status = "training"
    outcome.global_step = int(instance.state.get("global_step", 0))
    preemption, loop = Preemption(instance), LoopWatch(instance, runtime)
    loop.install()
    runtime.enters("training", checkpoints=runtime.lifeline is not None and preemption.install())
    runtime.call("before_train", instance)
    outcome.max_train_steps = int(getattr(instance.config, "max_train_steps", 0) or 0)
    try:
        result = wrapped(*args, **kwargs)
        outcome.status = "completed"
        return result
    except CheckpointWritten as written:
        outcome.interrupt(str(written), TRY_AGAIN)
        raise
    except KeyboardInterrupt:
        if outcome.status != "failed":  # else a feature of ours had to end the run, and has said why
            outcome.interrupt_by_user()
        raise
    except SystemExit as stopped:
        outcome.status, outcome.reason = "interrupted", f"SimpleTuner left with exit code {stopped.code}"
        raise
    except Exception as failure:
        runtime.failed(failure)
        raise
    finally:
        outcome.global_step = int(instance.state.get("global_step", 0))
        loop.conclude(completed=outcome.status == "completed")
        runtime.unwind("after_train", instance)
        loop.remove()
        preemption.uninstall()


def _checkpoint_state_save(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A checkpoint is to be written, by the ranks that this release has write."""
    given = dict(zip(("output_dir", "suffix"), args, strict=False)) | kwargs
    for save in runtime.moment("save_checkpoint"):
        return save(instance, wrapped, given["output_dir"], given.get("suffix"))
    return wrapped(*args, **kwargs)


def _prepare_batch(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A batch is ready for the model. ``False`` marks the end of an epoch and passes through."""
    batch = wrapped(*args, **kwargs)
    if isinstance(batch, dict):
        for prepared in runtime.moment("batch_prepared"):
            batch = prepared(instance, batch)
    return batch


def _model_predict(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The forward pass. Predictions without gradients (a parent's, an evaluation's) are nobody's business."""
    import torch

    moments = runtime.moment("predicting")
    if not moments or not torch.is_grad_enabled():
        return wrapped(*args, **kwargs)
    batch = args[0] if args else kwargs["prepared_batch"]
    with ExitStack() as during:
        for predicting in reversed(
            moments
        ):  # of hooks on saved tensors the innermost, an earlier feature's, are called
            during.enter_context(predicting(instance, batch))
        return wrapped(*args, **kwargs)


def _emit_event(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A training status event with progress is about to be sent: our metrics go with it."""
    event = args[0] if args else kwargs.get("event")
    metrics = (event.get("progress") or {}).get("metrics") if isinstance(event, dict) else None
    if isinstance(metrics, dict):
        runtime.call("metrics", metrics)
        runtime.call("event_sent", metrics)
    return wrapped(*args, **kwargs)


SEAMS = (
    wrapping("trainer.parse_arguments", _parse_arguments),
    wrapping("trainer.init_data_backend", _init_data_backend),
    wrapping("trainer.init_hooks", _init_hooks),
    wrapping("trainer.init_ema_model", _init_ema_model),
    wrapping("trainer.init_resume_checkpoint", _init_resume_checkpoint),
    wrapping("trainer.train", _train),
    wrapping("trainer.checkpoint_state_save", _checkpoint_state_save),
    wrapping("trainer.prepare_batch", _prepare_batch),
    wrapping("trainer.model_predict", _model_predict),
    wrapping("trainer.emit_event", _emit_event),
)
