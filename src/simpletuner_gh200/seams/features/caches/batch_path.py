"""The batch path: what collate asks for, answered straight from slabs, with upstream's own checks and keys."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from simpletuner_gh200.cache.batch import Delivery, same_tensor, stacked
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.entries import Found
from simpletuner_gh200.cache.hbm import HbmTier
from simpletuner_gh200.cache.pack_segment import DamagedEntry
from simpletuner_gh200.cache.record import copying_maker
from simpletuner_gh200.cache.source import normal
from simpletuner_gh200.cache.table import DAMAGED, Table
from simpletuner_gh200.seams.features.caches.own_way import or_upstream

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

    The one place that knows a tensor of SimpleTuner's by its address (the HBM tier goes by those of our own slabs). It
    has to: SimpleTuner hands rows and batches on as plain tensors, and takes nothing else along with them. An
    address may be given to another tensor once the first one is gone, so an entry keeps a weak reference to the tensor
    it was made for and counts for nothing when that one is dead. While it lives, no other tensor has its address.
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

    ``vae_tables`` maps the id of a VAE cache to its table. Latent rows that leave here were looked at when they were
    taken in: they are finite and alike, so they need not be looked at again.
    """

    def __init__(
        self,
        collate: ModuleType,
        vae_tables: Mapping[str, Table],
        *,
        latents: Delivery,
        embeds: BufferPool,
        hbm: HbmTier | None = None,
        text_tables: Sequence[Table] = (),
    ) -> None:
        self._collate = collate
        self._text_tables = text_tables
        self._vae_tables = vae_tables
        self._latents = latents
        self._embeds = embeds
        self._hbm = hbm
        self._unstacked = ByAddress[Any](MOST_UNSTACKED)
        """Batches that were handed out as rows."""
        self._under_way = ByAddress[tuple[Table, float]](MOST_UNDER_WAY)
        """Batches on their way to the device: whose they are, and since when."""

    def used(self, latents: Any) -> None:
        """A batch goes into the model now: how far ahead of that was it?"""
        found = self._under_way.take(latents)
        if found is not None:
            table, since = found
            table.statistics.staging_lead_seconds = time.monotonic() - since

    # -- latents ---------------------------------------------------------------------------------------

    def compute_latents(self, filepaths: Sequence[str], data_backend_id: str) -> list[Any] | None:
        """The latents of a batch, in upstream's form; None where upstream has to do it."""
        table = self._vae_tables.get(data_backend_id)
        if table is None or not filepaths:
            return None
        ours = partial(self._latents_of, table, filepaths, data_backend_id)
        return or_upstream("latents", ours, None, table.statistics.decline)

    def _latents_of(self, table: Table, filepaths: Sequence[str], data_backend_id: str) -> list[Any] | None:
        tracker = self._collate.StateTracker
        if "deepfloyd" in tracker.get_args().model_family:
            table.statistics.decline("DeepFloyd's, which SimpleTuner makes anew")
            return None
        name_of = tracker.get_vaecache(id=data_backend_id).generate_vae_cache_filename
        paths = [normal(name_of(path)[0]) for path in filepaths]
        entries = table.find_all(paths)
        if entries is None:
            _count_what_is_yet_to_be_made(table, paths)
            table.statistics.decline("an entry is not held")
            return None
        if not all(entry.finite for entry in entries):
            table.statistics.decline("NaN or infinity, which SimpleTuner judges")
            return None
        leaves = [entry.layout.single or entry.layout.named.get(LATENTS) for entry in entries]
        if same_tensor(leaves) is None:
            table.statistics.decline("latents of different shapes or types")
            return None
        try:
            batch = self._latents.rows(entries, [leaf for leaf in leaves if leaf is not None])
        except DamagedEntry:  # upstream asks for them one by one, which tells the one that it is
            table.statistics.decline(DAMAGED)
            return None
        if batch is None:
            table.statistics.decline("no room on the device")
            return None
        for _ in entries:
            table.statistics.hits.add()
            table.statistics.batched.add()
        if self._latents.on_device:
            self._under_way.put(batch, (table, time.monotonic()))
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
            "stacking latents", lambda: self.stack_of(latents), None, _of_first(self._vae_tables.values())
        )
        if batch is None:
            return wrapped(latents, *rest, **options)
        # Stand-ins that pass the checks of content; those of the samples (aspect ratios) are upstream's to make.
        wrapped([torch.empty(0)] * len(latents), *rest, **options)
        return batch.to(self._collate.StateTracker.get_accelerator().device)

    # -- text embeds -----------------------------------------------------------------------------------

    def collating(self, model: Any) -> Any:
        """``model`` with upstream's default way of joining embeds done in reused memory."""
        return _CollatingModel(model, self._embeds, self._hbm, self._count_joined, _of_first(self._text_tables))

    def _count_joined(self, outputs: Sequence[Any]) -> None:
        """Embeds that were joined here: of the one text cache, or of the one whose memory they lie in."""
        for output in outputs:
            tables = self._text_tables
            if len(tables) > 1:
                tables = [table for table in tables if table.published_at(output["prompt_embeds"].data_ptr())]
            for table in tables[:1]:
                table.statistics.batched.add()


class _CollatingModel:
    """Answers like the model. A model with a ``collate_prompt_embeds`` of its own keeps it."""

    def __init__(
        self,
        model: Any,
        pool: BufferPool,
        hbm: HbmTier | None,
        joined: Callable[[Sequence[Any]], None],
        declined: Callable[[str], None],
    ) -> None:
        self._model = model
        self._joined = joined
        self._declined = declined
        self._pool = pool
        self._hbm = hbm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def collate_prompt_embeds(self, outputs: Any) -> Any:
        own = self._model.collate_prompt_embeds(outputs)
        if own != {}:
            return own
        left_to_upstream: dict[str, torch.Tensor] = {}
        return or_upstream("joining embeds", lambda: self._join(outputs), left_to_upstream, self._declined)

    def _join(self, outputs: Any) -> dict[str, torch.Tensor]:
        joined = join_embeds(outputs, self._pool, self._hbm)
        if "prompt_embeds" in joined:
            self._joined(outputs)
        elif "prompt_embeds" in outputs[0]:
            self._declined("embeds of different shapes or types, or no room on the device")
        return joined


def _of_first(tables: Iterable[Table]) -> Callable[[str], None]:
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


def join_embeds(outputs: Sequence[Any], pool: BufferPool, hbm: HbmTier | None = None) -> dict[str, torch.Tensor]:
    """As upstream's default collate does; empty, so that upstream does it, where anything is out of the ordinary.

    With an HBM tier the result is on the device, from the copies that are there and copies of the rest.
    """
    joined: dict[str, torch.Tensor] = {}
    for key, name in _JOINED:
        if key not in outputs[0]:
            continue
        tensors = [output.get(key) for output in outputs]
        if any(tensor is None or tensor.dim() not in (1, 2, 3) for tensor in tensors):
            return {}
        whole = _on_device(tensors, hbm) if hbm is not None else stacked(tensors, pool, joined=tensors[0].dim() == 3)
        if whole is None:
            return {}
        joined[name] = whole
    return joined


def _on_device(tensors: Sequence[torch.Tensor], hbm: HbmTier) -> torch.Tensor | None:
    import torch

    alike = {(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors}
    if len(alike) != 1 or any(not tensor.is_contiguous() or tensor.requires_grad for tensor in tensors):
        return None
    try:
        rows = [hbm.on_device(tensor) for tensor in tensors]
        return torch.cat(rows) if rows[0].dim() == 3 else torch.stack(rows)
    except torch.cuda.OutOfMemoryError:
        hbm.give_up()
        return None


def _count_what_is_yet_to_be_made(table: Table, paths: Sequence[str]) -> None:
    """With ``vae_cache_ondemand`` SimpleTuner encodes what has no file, and asks no backend for it that could count."""
    for path in paths:
        if not os.path.exists(path):
            table.statistics.misses.add()


def _in_its_container(entry: Found, row: torch.Tensor) -> Any:
    """The row itself, or the entry's dict with the row as its latent and fresh copies of the rest."""
    if entry.layout.single is not None:
        return row
    latent = entry.layout.named[LATENTS]
    copy = copying_maker(entry.payload)
    return entry.layout.build(lambda leaf: row if leaf is latent or leaf == latent else copy(leaf))
