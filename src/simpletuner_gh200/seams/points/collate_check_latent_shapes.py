"""A batch's latents, checked and stacked: not a second time if they were assembled in place."""

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
        if path is None or not args:
            return wrapped(*args, **kwargs)
        return path.check_latent_shapes(wrapped, *args, **kwargs)

    return [wrap_method(module, "check_latent_shapes", around)]


SEAM = Seam("collate.check_latent_shapes", _patches)
