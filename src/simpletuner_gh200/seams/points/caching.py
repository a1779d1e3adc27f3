"""Caches and batches: features hear of a rebuild before it begins, and samples become a batch straight from slabs.

What joins a batch are module globals that ``collate_fn`` looks up at each call. Where a feature's batch path has no
answer, nothing of the call was consumed, so that SimpleTuner's own function can still do all of it.
"""

from __future__ import annotations

from typing import Any

from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import wrapping


def _vae_rebuild(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    runtime.call("rebuild_cache", instance)
    return wrapped(*args, **kwargs)


def _vae_pass(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    for offered in runtime.moment("caching_pass"):
        run = offered(instance)
        if run is not None:
            return run(lambda: wrapped(*args, **kwargs))
    return wrapped(*args, **kwargs)


def _compute_latents(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def ours(filepaths: Any, data_backend_id: str, model: Any) -> Any:
        path = runtime.batch_path
        return None if path is None else path.compute_latents(filepaths, data_backend_id)

    latents = ours(*args, **kwargs)
    return wrapped(*args, **kwargs) if latents is None else latents


def _check_latent_shapes(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Checked and stacked: not a second time if they were assembled in place."""
    path = runtime.batch_path
    if path is None or not args:
        return wrapped(*args, **kwargs)
    return path.check_latent_shapes(wrapped, *args, **kwargs)


def _compute_prompt_embeddings(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Text embeds are joined in reused memory, unless the model joins them itself."""

    def ours(prompt_entries: Any, text_embed_cache: Any, model: Any) -> Any:
        path = runtime.batch_path
        return wrapped(prompt_entries, text_embed_cache, model if path is None else path.collating(model))

    return ours(*args, **kwargs)


SEAMS = (
    wrapping("caching.vae_rebuild", _vae_rebuild),
    wrapping("caching.vae_pass", _vae_pass),
    wrapping("collate.compute_latents", _compute_latents),
    wrapping("collate.check_latent_shapes", _check_latent_shapes),
    wrapping("collate.compute_prompt_embeddings", _compute_prompt_embeddings),
)
