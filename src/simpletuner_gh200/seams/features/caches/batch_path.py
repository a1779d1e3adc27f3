"""The batch path: what collate asks for, answered straight from held memory, with upstream's own checks and keys."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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

MOST_UNDER_WAY = 64
"""Batches on their way to the model that are still looked for; some are made and never used."""

MOST_UNSTACKED = 4
"""Batches handed out as rows whose stack collate has not asked for yet; some rows are never stacked."""

T = TypeVar("T")


class ByAddress(Generic[T]):
    """What is known of a batch of ours, found again by where its memory begins.

    The one place that knows a tensor of SimpleTuner's by its address. It has to: SimpleTuner hands rows and batches on
    as plain tensors, and takes nothing else along with them. An address may be given to another tensor once the first
    one is gone, so an entry keeps a weak reference to the tensor it was made for and counts for nothing when that one
    is dead. While it lives, no other tensor has its address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def put(self, tensor: torch.Tensor, known: T) -> None:
        """The oldest entry gives way where there are too many."""
        # Collate may run in upstream's prefetching thread: another may have taken the oldest meanwhile.
        while len(self._entries) >= self._most:
            self._entries.pop(next(iter(self._entries), 0), None)
        self._entries[tensor.data_ptr()] = (weakref.ref(tensor), known)

    def take(self, tensor: Any) -> T | None:
        """What is known of the tensor that begins where ``tensor`` does, once."""
        address = getattr(tensor, "data_ptr", None)
        if address is None or not self._entries:
            return None
        made_for, known = self._entries.pop(address(), (_gone, None))
        return known if made_for() is not None else None


def _gone() -> None:
    return None


class BatchPath:
    """Made once the caches are attached; the collate seams ask it first.

    ``vae_caches`` maps the id of SimpleTuner's VAE cache to ours. Latent rows that leave here were looked at when they
    were taken in: they are finite and alike, so they need not be looked at again.
    """

    def __init__(
        self,
        collate: ModuleType,
        vae_caches: Mapping[str, HeldCache],
        *,
        latents: Delivery,
        embeds: BufferPool,
        text_caches: Sequence[HeldCache] = (),
    ) -> None:
        self._collate = collate
        self._text_caches = text_caches
        self._vae_caches = vae_caches
        self._latents = latents
        self._embeds = embeds
        self._unstacked = ByAddress[Any](MOST_UNSTACKED)
        """Batches that were handed out as rows."""
        self._under_way = ByAddress[tuple[HeldCache, float]](MOST_UNDER_WAY)
        """Batches on their way to the device: whose they are, and since when."""

    def used(self, latents: Any) -> None:
        """A batch goes into the model now: how far ahead of that was it?"""
        found = self._under_way.take(latents)
        if found is not None:
            cache, since = found
            cache.statistics.staging_lead_seconds = time.monotonic() - since

    # -- latents ---------------------------------------------------------------------------------------

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
            batch = self._latents.rows(entries, [leaf for leaf in leaves if leaf is not None])
        except DamagedEntry:  # upstream asks for them one by one, which tells the one that it is
            cache.statistics.decline(DAMAGED)
            return None
        if batch is None:
            cache.statistics.decline("no room on the device")
            return None
        cache.statistics.hits += len(entries)
        cache.statistics.batched += len(entries)
        if self._latents.on_device and all(entry.address is not None for entry in entries):
            self._under_way.put(batch, (cache, time.monotonic()))
        self._unstacked.put(batch, batch)  # collate asks for its stack next
        return [_in_its_container(entry, row) for entry, row in zip(entries, batch.unbind(0), strict=True)]

    def stack_of(self, latents: Sequence[Any]) -> torch.Tensor | None:
        """The batch whose rows, in order, are ``latents``; None if they are anything else."""
        import torch

        if not latents or type(latents[0]) is not torch.Tensor:
            return None
        batch: torch.Tensor | None = self._unstacked.take(latents[0])
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

        batch = or_upstream(
            "stacking latents", lambda: self.stack_of(latents), None, _of_first(self._vae_caches.values())
        )
        if batch is None:
            return wrapped(latents, *rest, **options)
        # Stand-ins that pass the checks of content; those of the samples (aspect ratios) are upstream's to make.
        wrapped([torch.empty(0)] * len(latents), *rest, **options)
        return batch.to(self._collate.StateTracker.get_accelerator().device)

    # -- text embeds -----------------------------------------------------------------------------------

    def collating(self, model: Any) -> Any:
        """``model`` with upstream's default way of joining embeds done in reused memory."""
        return _CollatingModel(model, self)

    def join(self, outputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Embeds of a batch; nothing, so that upstream does it, where that can't be done here."""
        left_to_upstream: dict[str, torch.Tensor] = {}
        return or_upstream(
            "joining embeds", lambda: self._join(outputs), left_to_upstream, _of_first(self._text_caches)
        )

    def _join(self, outputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        joined = join_embeds(outputs, self._embeds)
        if "prompt_embeds" in joined and len(self._text_caches) == 1:  # of several nobody knows which it was
            self._text_caches[0].statistics.batched += len(outputs)
        elif "prompt_embeds" not in joined and "prompt_embeds" in outputs[0]:
            _of_first(self._text_caches)("embeds of different shapes or types")
        return joined


class _CollatingModel:
    """Answers like the model. A model with a ``collate_prompt_embeds`` of its own keeps it."""

    def __init__(self, model: Any, path: BatchPath) -> None:
        self._model, self._path = model, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def collate_prompt_embeds(self, outputs: Any) -> Any:
        own = self._model.collate_prompt_embeds(outputs)
        return own if own != {} else self._path.join(outputs)


def _of_first(tables: Iterable[HeldCache]) -> Callable[[str], None]:
    """Where it can't be told whose batch it was: the first cache of the kind counts it. Nobody, where there is none."""
    first = next(iter(tables), None)
    return first.statistics.decline if first is not None else lambda _reason: None


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
