"""A batch's latents, fetched from slabs where all of them are held."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.points._batch_path import batch_path
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        path = batch_path(runtime)
        if path is None:
            return wrapped(*args, **kwargs)

        def ours(filepaths: Any, data_backend_id: str, model: Any) -> Any:
            return path.compute_latents(filepaths, data_backend_id)

        latents = ours(*args, **kwargs)
        return wrapped(*args, **kwargs) if latents is None else latents

    return [wrap_method(module, "compute_latents", around)]


SEAM = Seam("collate.compute_latents", _patches)
