"""Seam 6: datasets and caches are made here; features act before and after."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        runtime.phases.end("models")
        runtime.call("before_data", instance)
        result = wrapped(*args, **kwargs)
        runtime.call("data_ready", instance)
        runtime.phases.end("data")
        return result

    return [wrap_method(module.Trainer, "init_data_backend", around)]


SEAM = Seam("trainer.init_data_backend", _patches)
