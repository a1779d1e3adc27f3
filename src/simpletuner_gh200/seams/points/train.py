"""Seam: the training loop as a whole. Its outcome is recorded, because older releases exit 0 after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        runtime.phases.end("model load")
        outcome = runtime.outcome
        outcome.status = "training"
        outcome.max_train_steps = int(getattr(instance.config, "max_train_steps", 0) or 0)
        outcome.output_dir = str(getattr(instance.config, "output_dir", "") or "")
        runtime.call("before_train", instance)
        try:
            result = wrapped(*args, **kwargs)
            outcome.status = "completed"
            return result
        except KeyboardInterrupt:
            outcome.status, outcome.reason = "interrupted", "interrupted by the user"
            raise
        except SystemExit as stopped:
            outcome.status, outcome.reason = "interrupted", f"SimpleTuner left with exit code {stopped.code}"
            raise
        except Exception as failure:
            outcome.status, outcome.reason = "failed", f"{type(failure).__name__}: {failure}"
            raise
        finally:
            outcome.global_step = int(instance.state.get("global_step", 0))
            runtime.phases.end("train")
            runtime.call("after_train", instance)

    return [wrap_method(module.Trainer, "train", around)]


SEAM = Seam("trainer.train", _patches)
