"""Seam 10: a training status event with progress is about to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        event = args[0] if args else kwargs.get("event")
        if isinstance(event, dict) and "progress" in event:
            runtime.call("status_event", instance, event)
        return wrapped(*args, **kwargs)

    return [wrap_method(module.Trainer, "_emit_event", before)]


SEAM = Seam("trainer.emit_event", _patches)
