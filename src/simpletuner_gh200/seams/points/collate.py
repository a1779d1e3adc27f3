"""Samples become a batch: straight from slabs where a feature's batch path can, else as SimpleTuner does it.

These are module globals that ``collate_fn`` looks up at each call. Where the batch path has no answer, nothing of the
call was consumed, so that SimpleTuner's own function can still do all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import Patch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _compute_latents(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def instead(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        path = runtime.batch_path
        if path is None:
            return wrapped(*args, **kwargs)

        def ours(filepaths: Any, data_backend_id: str, model: Any) -> Any:
            return path.compute_latents(filepaths, data_backend_id)

        latents = ours(*args, **kwargs)
        return wrapped(*args, **kwargs) if latents is None else latents

    return [wrap_method(module, "compute_latents", instead)]


def _check_latent_shapes(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Checked and stacked: not a second time if they were assembled in place."""

    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        path = runtime.batch_path
        if path is None or not args:
            return wrapped(*args, **kwargs)
        return path.check_latent_shapes(wrapped, *args, **kwargs)

    return [wrap_method(module, "check_latent_shapes", around)]


def _compute_prompt_embeddings(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Text embeds are joined in reused memory, unless the model joins them itself."""

    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        path = runtime.batch_path
        if path is None:
            return wrapped(*args, **kwargs)

        def ours(prompt_entries: Any, text_embed_cache: Any, model: Any) -> Any:
            return wrapped(prompt_entries, text_embed_cache, path.collating(model))

        return ours(*args, **kwargs)

    return [wrap_method(module, "compute_prompt_embeddings", around)]


SEAMS = (
    Seam("collate.compute_latents", _compute_latents),
    Seam("collate.check_latent_shapes", _check_latent_shapes),
    Seam("collate.compute_prompt_embeddings", _compute_prompt_embeddings),
)
