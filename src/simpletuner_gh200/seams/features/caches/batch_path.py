"""The batch path: what collate asks for, answered straight from held memory, with upstream's own checks and keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.held.batch import Delivery, same_tensor, stacked
from simpletuner_gh200.held.buffers import BufferPool
from simpletuner_gh200.held.cache import DAMAGED, Found, HeldCache
from simpletuner_gh200.held.record import copying_maker
from simpletuner_gh200.held.segment import DamagedEntry
from simpletuner_gh200.held.source import normal
from simpletuner_gh200.seams.features.caches.backends import or_upstream

if TYPE_CHECKING:
    import torch

LATENTS = "latents"
"""The key of the latent in an entry that is a dict."""

MOST_UNSTACKED = 4
"""Batches handed out as rows whose stack collate has not asked for yet; some rows are never stacked."""


class BatchPath:
    """Made once the caches are attached; the collate seams ask it first.

    ``vae_caches`` maps the id of SimpleTuner's VAE cache to ours. Latent rows that leave here were looked at when they
    were taken in: they are finite and alike, so they need not be looked at again.
    """

    def __init__(self, collate: ModuleType, vae_caches: Mapping[str, HeldCache], latents: Delivery) -> None:
        self._collate = collate
        self._vae_caches = vae_caches
        self._latents = latents
        self._embeds = BufferPool()
        self._unstacked: dict[int, torch.Tensor] = {}
        """Batches that were handed out as rows, by their address, which no other tensor has while they are here."""

    def collating(self, model: Any) -> Any:
        """``model`` with upstream's default way of joining embeds done in reused memory: fresh pages cost more."""
        return _CollatingModel(model, self._embeds)

    def compute_latents(self, filepaths: Sequence[str], data_backend_id: str) -> list[Any] | None:
        """The latents of a batch, in upstream's form; None where upstream has to do it."""
        cache = self._vae_caches.get(data_backend_id)
        if cache is None or not filepaths:
            return None
        ours = partial(self._latents_of, cache, filepaths, data_backend_id)
        return or_upstream("latents", ours, None, cache.statistics.decline)

    def _latents_of(self, cache: HeldCache, filepaths: Sequence[str], data_backend_id: str) -> list[Any] | None:
        tracker = self._collate.StateTracker
        if "deepfloyd" in tracker.get_args().model_family:
            cache.statistics.decline("DeepFloyd's, which SimpleTuner makes anew")
            return None
        name_of = tracker.get_vaecache(id=data_backend_id).generate_vae_cache_filename
        paths = [normal(name_of(path)[0]) for path in filepaths]
        entries = cache.find_all(paths)
        if entries is None:
            _count_what_is_yet_to_be_made(cache, paths)
            cache.statistics.decline("an entry is not held")
            return None
        if not all(entry.finite for entry in entries):
            cache.statistics.decline("NaN or infinity, which SimpleTuner judges")
            return None
        leaves = [entry.layout.single or entry.layout.named.get(LATENTS) for entry in entries]
        if same_tensor(leaves) is None:
            cache.statistics.decline("latents of different shapes or types")
            return None
        try:
            batch = self._latents(entries, [leaf for leaf in leaves if leaf is not None])
        except DamagedEntry:  # upstream asks for them one by one, which tells the one that it is
            cache.statistics.decline(DAMAGED)
            return None
        if batch is None:
            cache.statistics.decline("no room on the device")
            return None
        cache.statistics.hits += len(entries)
        cache.statistics.batched += len(entries)
        # Collate asks for its stack next, maybe in a prefetching thread: another may take the oldest, too.
        while len(self._unstacked) >= MOST_UNSTACKED:
            self._unstacked.pop(next(iter(self._unstacked), 0), None)
        self._unstacked[batch.data_ptr()] = batch
        return [_in_its_container(entry, row) for entry, row in zip(entries, batch.unbind(0), strict=True)]

    def stack_of(self, latents: Sequence[Any]) -> torch.Tensor | None:
        """The batch whose rows, in order, are ``latents``; None if they are anything else."""
        import torch

        if not latents or type(latents[0]) is not torch.Tensor:
            return None
        batch = self._unstacked.pop(latents[0].data_ptr(), None)
        if batch is None or len(batch) != len(latents):
            return None
        step = batch.stride(0) * batch.itemsize
        alike = (batch.shape[1:], batch.stride()[1:], batch.dtype)
        for index, row in enumerate(latents):
            same = type(row) is torch.Tensor and (row.shape, row.stride(), row.dtype) == alike
            if not same or row.data_ptr() != batch.data_ptr() + index * step:
                return None
        return batch

    def check_latent_shapes(self, wrapped: Callable[..., Any], latents: Any, *rest: Any, **options: Any) -> Any:
        """Upstream's own checks of the samples, but no second look at the bytes and no second stack."""
        import torch

        first = next(iter(self._vae_caches.values()), None)  # whose batch it was can't be told
        decline = first.statistics.decline if first is not None else lambda _reason: None
        batch = or_upstream("stacking latents", lambda: self.stack_of(latents), None, decline)
        if batch is None:
            return wrapped(latents, *rest, **options)
        # Stand-ins that pass the checks of content; those of the samples (aspect ratios) are upstream's to make.
        wrapped([torch.empty(0)] * len(latents), *rest, **options)
        return batch.to(self._collate.StateTracker.get_accelerator().device)


class _CollatingModel:
    """Answers like the model. A model with a ``collate_prompt_embeds`` of its own keeps it."""

    def __init__(self, model: Any, pool: BufferPool) -> None:
        self._model, self._pool = model, pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def collate_prompt_embeds(self, outputs: Any) -> Any:
        """Empty, so that upstream does it, where that can't be done here."""
        own = self._model.collate_prompt_embeds(outputs)
        nothing: dict[str, torch.Tensor] = {}
        ours = partial(join_embeds, outputs, self._pool)
        return own if own != {} else or_upstream("joining embeds", ours, nothing, lambda _reason: None)


_JOINED = (
    ("prompt_embeds", "prompt_embeds"),
    ("pooled_prompt_embeds", "pooled_prompt_embeds"),
    ("attention_mask", "attention_masks"),
    ("prompt_attention_mask", "attention_masks"),
    ("attention_masks", "attention_masks"),
    ("time_ids", "time_ids"),
)
"""What upstream's default collate joins, under which name; a later line replaces an earlier one."""


def join_embeds(outputs: Sequence[Any], pool: BufferPool) -> dict[str, torch.Tensor]:
    """As upstream's default collate does; empty, so that upstream does it, where anything is out of the ordinary."""
    joined: dict[str, torch.Tensor] = {}
    for key, name in _JOINED:
        if key not in outputs[0]:
            continue
        tensors = [output.get(key) for output in outputs]
        if any(tensor is None or tensor.dim() not in (1, 2, 3) for tensor in tensors):
            return {}
        whole = stacked(tensors, pool, joined=tensors[0].dim() == 3)
        if whole is None:
            return {}
        joined[name] = whole
    return joined


def _count_what_is_yet_to_be_made(cache: HeldCache, paths: Sequence[str]) -> None:
    """With ``vae_cache_ondemand`` SimpleTuner encodes what has no file, and asks no backend for it that could count."""
    for path in paths:
        if not os.path.exists(path):
            cache.statistics.misses += 1


def _in_its_container(entry: Found, row: torch.Tensor) -> Any:
    """The row itself, or the entry's dict with the row as its latent and fresh copies of the rest."""
    if entry.layout.single is not None:
        return row
    latent = entry.layout.named[LATENTS]
    copy = copying_maker(entry.payload)
    return entry.layout.build(lambda leaf: row if leaf is latent or leaf == latent else copy(leaf))
