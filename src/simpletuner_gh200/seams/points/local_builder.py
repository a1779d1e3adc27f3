"""Seam 4: a local data backend is made; a feature may make its own instead."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def instead(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        config = args[0] if args else kwargs["config"]
        for create in runtime.moment("create_backend"):
            backend = create(instance, config)
            if backend is not None:
                return backend
        return wrapped(*args, **kwargs)

    return [wrap_method(module.LocalBackendBuilder, "_create_backend", instead)]


SEAM = Seam("datasets.local_builder", _patches)
