"""Seam 7: a VAE cache is about to be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        runtime.call("rebuild_cache", instance)
        return wrapped(*args, **kwargs)

    return [wrap_method(module.VAECache, "rebuild_cache", before)]


SEAM = Seam("caching.vae_rebuild", _patches)
