"""SimpleTuner's caches: features hear of a rebuild before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import Patch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _vae_rebuild(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        runtime.call("rebuild_cache", instance)
        return wrapped(*args, **kwargs)

    return [wrap_method(module.VAECache, "rebuild_cache", before)]


SEAMS = (Seam("caching.vae_rebuild", _vae_rebuild),)
