"""Seam 9: upstream registers its save and load hooks; ours follow."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        runtime.call("hooks_ready", instance)
        return result

    return [wrap_method(module.Trainer, "init_hooks", after)]


SEAM = Seam("trainer.init_hooks", _patches)
