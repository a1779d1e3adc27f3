"""One pass of SimpleTuner over a data set's pictures, with workers ahead of it and a writer behind it.

SimpleTuner's ``process_buckets`` stays in charge: order, queues, batches and their remainders, random numbers, metadata
and deletions are its own. Replaced, for as long as it runs, are the ends of its stages: reading returns tickets for
pictures that workers are at, preparing and transforming exchange them for what the workers made, and writing is handed
over. What a worker could not do, SimpleTuner's own function does here, in its turn.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from simpletuner_gh200.caching.pipeline import FileInFlight, WorkAhead, WorkBehind, grouped
from simpletuner_gh200.caching.workers import WorkerPool
from simpletuner_gh200.seams.features.caching.hands import Hands
from simpletuner_gh200.seams.features.caching.jobs import (
    WithCompanion,
    as_image,
    companions_of,
    context_of,
    draw_crop,
    job_of,
    weight_of,
)
from simpletuner_gh200.seams.features.caching.preparing import COMPANION, Companion, Preparation
from simpletuner_gh200.seams.features.caching.turns import STAGES, Turns
from simpletuner_gh200.seams.patch import Patch, Patches, put, wrap_method
from simpletuner_gh200.telemetry.progress import LINE_EVERY_SECONDS
from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.units import format_seconds

logger = logging.getLogger("simpletuner_gh200")

PICTURE_SECONDS = 300.0
"""A slow disk is waited for, a decoder that has lost its way is not; and a second more for each megapixel."""

WRITES_BEHIND = 2
"""Batches that wait to be written."""


@dataclass(eq=False)
class Ticket:
    """A picture of this pass, where SimpleTuner has an image."""

    path: str
    verdict: Preparation
    array: Any
    bucket_of: Any = None
    image: Any = None
    """As SimpleTuner has read it, where a worker did not."""


@dataclass(eq=False)
class _Prepared:
    """What SimpleTuner's transforms are given in place of an image that a worker has transformed."""

    tensor: Any
    words: str = ""
    """Why it could not be."""


class Pass:
    """``run`` calls ``process_buckets`` of one of SimpleTuner's VAE caches."""

    def __init__(
        self,
        cache: Any,
        module: ModuleType,
        pool: WorkerPool,
        ceiling: int,
        *,
        seconds: float = PICTURE_SECONDS,
        tell: Callable[[dict[str, Any]], object] = lambda told: None,
    ) -> None:
        """``tell``: how far it is, now and then, for whoever looks."""
        self.pictures = 0
        self.seconds = 0.0
        self.ahead: WorkAhead | None = None
        self.expected = 0
        self._cache = cache
        self._module = module
        self._pool = pool
        self._ceiling = ceiling
        self._patience = seconds
        self._tell = tell
        self._began = self._said = time.monotonic()
        self._buckets: list[Any] | None = None
        self._patches = Patches()
        self._words: set[str] = set()
        self._hands: Hands | None = None
        self._in_batches = hasattr(cache.batch_processor, "batch_calculate_luminance")
        dataset = context_of(cache)
        self._dataset = pickle.dumps(dataset)
        self._transformed_by_worker = dataset.transform is not None
        self._video_extensions = dataset.video_extensions
        self._batches = cache.batch_processor
        self._transform = cache.transform_sample
        self._prepare = module.prepare_sample
        self._turns = Turns(cache.max_workers)
        self.behind = WorkBehind(WRITES_BEHIND, _not_written)

    def run(self, process_buckets: Callable[[], Any]) -> Any:
        self._patches.install(*self._substitutes())
        try:
            return process_buckets()
        finally:
            if self.ahead is not None:
                self.ahead.stop()
            self.behind.close()
            self._patches.remove()
            if self._hands is not None:
                self._hands.finish()
            self.seconds = time.monotonic() - self._began
            self._tell(self.told())

    @property
    def most(self) -> int:
        """Bytes of pictures that were in flight at once."""
        return self.ahead.most if self.ahead is not None else 0

    def line(self) -> str:
        """For people: how far, how fast, what bounds it, how long still."""
        seconds = self.seconds or time.monotonic() - self._began
        rate = self.pictures / max(seconds, 1e-6)
        left = max(self.expected - self.pictures, 0)
        done = f"{self.pictures} of {self.expected} pictures, {rate:.3g}/s, bound by {self.bound_by}"
        return f"{done}, {format_seconds(left / rate)} remaining" if left and rate else done

    def told(self) -> dict[str, Any]:
        numbers = {"dataset": self._cache.id, "pictures": self.pictures, "expected": self.expected}
        return {**numbers, "bound_by": self.bound_by, "words": f"{self._cache.id}: {self.line()}"}

    @property
    def bound_by(self) -> str:
        """What the pass has waited for the longest."""
        decoding, writing = (self.ahead.waited if self.ahead else 0.0), self.behind.waited
        rest = (self.seconds or time.monotonic() - self._began) - decoding - writing
        return max((decoding, "decoding"), (writing, "writing"), (rest, "the VAE"))[1]

    # -- what takes the place of SimpleTuner's stages ------------------------------------------------------------

    def _substitutes(self) -> Iterator[Patch]:
        cache = self._cache
        images, files = cache.image_data_backend, cache.cache_data_backend
        yield wrap_method(self._module, "shuffle", self._note_order)
        yield wrap_method(cache, "_reduce_bucket", self._begin)
        for place, stage in enumerate(STAGES):
            yield wrap_method(cache, stage, self._turns.taken_by(place))
        yield wrap_method(cache, "_process_futures", self._turns.given)
        yield wrap_method(images, "read_image_batch", self._read)
        yield put(cache, "batch_processor", SimpleNamespace(process_aspect_grouped_images=self._group))
        yield put(self._module, "prepare_sample", self._prepare_sample)
        yield put(cache, "transform_sample", self._transformed)
        yield wrap_method(files, "write_batch", self._write)
        yield wrap_method(files, "exists", self._exists)
        yield wrap_method(files, "list_files", self._after_writing)
        yield wrap_method(cache.accelerator, "wait_for_everyone", self._after_writing)

    def _note_order(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        wrapped(*args, **kwargs)
        if self._buckets is None:
            self._buckets = list(args[0])

    def _begin(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        """SimpleTuner looks for the first time at what a bucket needs: from here on it is known what will come."""
        if self.ahead is None:
            files: Mapping[Any, list[str]] = args[1] if len(args) > 1 else kwargs["aspect_bucket_cache"]
            order = list(self._coming(self._buckets or list(files), files))
            self.expected = len(order)
            ahead = WorkAhead(order, self._ceiling, partial(weight_of, self._cache))
            self._hands = Hands(self._pool, ahead, self._job, self._patience, self._say_once)
            if self._hands.start():
                self.ahead = ahead
            self._tell(self.told())
        return wrapped(*args, **kwargs)

    def _coming(self, buckets: list[Any], files: Mapping[Any, list[str]]) -> Iterator[tuple[str, Companion]]:
        cache = self._cache
        wanted = set(cache.local_unprocessed_files)
        for bucket in buckets:
            left = [path for path in files.get(bucket, ()) if path in wanted]
            for path, alone in grouped(left, cache.read_batch_size, cache.process_queue_size):
                together = self._in_batches and not alone and not self._is_video(path)
                yield path, "to be resized" if together else "none"

    def _read(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if self.ahead is None:
            return wrapped(*args, **kwargs)
        paths = list(args[0] if args else kwargs.pop("filepaths"))
        pieces = [self.ahead.claim(path) for path in paths]
        read, tickets = [], []
        for path, piece in zip(paths, pieces, strict=True):
            ticket = self._ticket(path, piece)
            if ticket.verdict.kind == "lost":
                self._leave_out(path, ticket.verdict.words)
                continue
            if ticket.verdict.kind in ("unread", "rank"):
                found, images = wrapped([path], *args[1:], **kwargs)
                if not found:
                    continue
                ticket.image = images[0]
            read.append(path)
            tickets.append(ticket)
        self.pictures += len(paths)
        if time.monotonic() - self._said >= LINE_EVERY_SECONDS:
            self._said = time.monotonic()
            logger.info("gh200: dataset %s: %s", self._cache.id, self.line())
            self._tell(self.told())
        return read, tickets

    def _ticket(self, path: str, piece: FileInFlight) -> Ticket:
        assert self.ahead is not None
        verdict, array = self.ahead.result(piece)
        piece.outcome = None
        return Ticket(path, verdict, array)

    def _group(self, grouped: Mapping[Any, list[tuple[str, Any, Any]]], metadata_backend: Any = None) -> list[Any]:
        results = []
        for bucket, group in grouped.items():
            tickets = [_ticket_of(path, image) for path, image, _bucket in group]
            companions: list[Companion] = ["none"] * len(tickets)
            videos = sum(self._is_video(ticket.path) for ticket in tickets)
            if self._in_batches and 0 < videos < len(tickets):
                results += self._grouped_here(bucket, tickets, metadata_backend)
                continue
            if self._in_batches and not videos:
                companions = companions_of([self._size_and_goal(ticket) for ticket in tickets])
            for ticket, companion in zip(tickets, companions, strict=True):
                again = ticket.verdict.kind in ("done", "skipped") and ticket.verdict.companion != companion
                if again and self.ahead is not None:
                    fresh = self._ticket(ticket.path, self.ahead.again(ticket.path, companion))
                    ticket.verdict, ticket.array = fresh.verdict, fresh.array
                ticket.bucket_of, ticket.verdict.companion = bucket, companion
                results += self._grouped(ticket, metadata_backend)
        return results

    def _size_and_goal(self, ticket: Ticket) -> tuple[Any, Any]:
        metadata = self._cache.metadata_backend.get_metadata_by_filepath(ticket.path) or {}
        size = ticket.verdict.size if ticket.image is None else getattr(ticket.image, "size", None)
        return size, metadata.get("target_size")

    def _grouped(self, ticket: Ticket, metadata_backend: Any) -> list[Any]:
        verdict = ticket.verdict
        if verdict.kind == "skipped":
            logger.warning("gh200: SimpleTuner has no use for the shape of %s, and skips it", printable(ticket.path))
            return []
        for path, attribute, value in verdict.updates:
            metadata_backend.update_metadata_attribute(path, attribute, value)
        if verdict.metadata is not None:
            metadata_backend.get_metadata_by_filepath(ticket.path).update(verdict.metadata)
        return [(ticket.path, ticket, {})]

    def _prepare_sample(self, image: Any = None, **where: Any) -> Any:
        from simpletuner_gh200.seams.features.caching.joining import BatchPicture

        if not isinstance(image, Ticket):
            return self._prepare(image=image, **where)
        verdict = image.verdict
        match verdict.kind:
            case "failed":
                raise RuntimeError(verdict.words)
            case "unread" | "rank" | "skipped" | "lost":
                return self._prepare_here(image, where)
        array, image.array = image.array, None
        coordinates = verdict.crop_coordinates
        if verdict.crop is not None:
            coordinates, (rows, columns) = draw_crop(verdict.crop)
            # Transformed it has its channels first.
            place = (..., rows, columns) if self._transformed_by_worker else (..., rows, columns, slice(None))
            array = array[place] if array is not None else None
        if verdict.words:
            return _Prepared(None, verdict.words), coordinates, verdict.aspect_ratio
        if self._transformed_by_worker:
            return _Prepared(BatchPicture.of(array)), coordinates, verdict.aspect_ratio
        if verdict.is_image:
            from PIL import Image

            array = Image.fromarray(array)
        return array, coordinates, verdict.aspect_ratio

    def _transformed(self, image: Any) -> Any:
        if not isinstance(image, _Prepared):
            return self._transform(image)
        if image.words:
            raise ValueError(image.words)
        return image.tensor

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> None:
        paths = list(map(_normal, args[0] if args else kwargs["filepaths"]))
        self.behind.hand_over(paths, lambda: wrapped(*args, **kwargs))

    def _exists(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        path = args[0] if args else kwargs["filepath"]
        if isinstance(path, (str, os.PathLike)):
            self.behind.wait_for(_normal(path))
        return wrapped(*args, **kwargs)

    def _after_writing(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        self.behind.drain()
        return wrapped(*args, **kwargs)

    # -- pictures ------------------------------------------------------------------------------------------------

    def _prepare_here(self, ticket: Ticket, where: dict[str, Any]) -> Any:
        """What the workers left to the rank: SimpleTuner's own functions, in its turn."""
        metadata = self._cache.metadata_backend
        group = [(ticket.path, self._image_of(ticket), ticket.bucket_of)]
        if ticket.verdict.companion != "none":
            group.append((COMPANION, np.zeros((2, 2, 3), np.uint8), ticket.bucket_of))
            metadata = WithCompanion(metadata, ticket.verdict.companion)
        results = self._batches.process_aspect_grouped_images({ticket.bucket_of: group}, metadata_backend=metadata)
        for path, array, _metadata in results:
            if path == ticket.path:
                return self._prepare(image=as_image(array), **where)
        raise ValueError("its shape is not that of an RGB image")

    def _grouped_here(self, bucket: Any, tickets: list[Ticket], metadata_backend: Any) -> list[Any]:
        """Pictures and moving ones together, which older releases take for one another when they measure them."""
        group = [(ticket.path, self._image_of(ticket), bucket) for ticket in tickets]
        return list(self._batches.process_aspect_grouped_images({bucket: group}, metadata_backend=metadata_backend))

    def _image_of(self, ticket: Ticket) -> Any:
        """Read here where only a worker has: it had to do it again, and could not."""
        return self._cache.image_data_backend.read_image(ticket.path) if ticket.image is None else ticket.image

    def _say_once(self, words: str) -> None:
        if words not in self._words:
            self._words.add(words)
            logger.warning("gh200: dataset %s: %s", self._cache.id, words)

    def _leave_out(self, path: str, why: str) -> None:
        """As SimpleTuner does with a picture that the VAE fails on: it stays where it is, and out of this run."""
        logger.error("gh200: %s is left out: two workers in turn crashed on it: %s", printable(path), why)
        filtered = getattr(self._cache, "_handle_metadata_filtered_sample", None)
        if filtered is None:
            self._cache.metadata_backend.remove_image(path)
        else:
            filtered(filepath=path, reason="problematic", delete_from_backend=False, details={"error": why})

    def _is_video(self, path: str) -> bool:
        return os.path.splitext(path)[1].lower().strip(".") in self._video_extensions

    # -- in threads of their own, one for each worker ------------------------------------------------------------

    def _job(self, piece: FileInFlight) -> tuple[Any, Any]:
        picture = job_of(self._cache, piece.file, piece.variant or "none")
        return (self._dataset, picture), self._content(piece.file)

    def _content(self, path: str) -> Any:
        """Its bytes, where they are in memory; else the worker reads the file."""
        staged = getattr(self._cache.image_data_backend, "staged", None)
        return b"" if staged is None else (staged.view(path) or b"")


def _ticket_of(path: str, read: Any) -> Ticket:
    """Where a whole batch could not be read, SimpleTuner reads one picture at a time by another way."""
    return read if isinstance(read, Ticket) else Ticket(path, Preparation("rank"), None, image=read)


def _not_written(failure: Exception) -> None:
    logger.error("gh200: a batch of latents could not be written: %s", failure, exc_info=failure)


def _normal(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))
