"""Seam 8: a batch is ready for the model. ``False`` marks the end of an epoch and passes through."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        if isinstance(batch, dict):
            for prepared in runtime.moment("batch_prepared"):
                batch = prepared(instance, batch)
        return batch

    return [wrap_method(module.Trainer, "prepare_batch", after)]


SEAM = Seam("trainer.prepare_batch", _patches)
