"""A batch's text embeds, joined in reused memory unless the model joins them itself."""

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

        def ours(prompt_entries: Any, text_embed_cache: Any, model: Any) -> Any:
            return wrapped(prompt_entries, text_embed_cache, path.collating(model))

        return ours(*args, **kwargs)

    return [wrap_method(module, "compute_prompt_embeddings", around)]


SEAM = Seam("collate.compute_prompt_embeddings", _patches)
