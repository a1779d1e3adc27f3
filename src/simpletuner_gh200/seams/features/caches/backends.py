"""Held caches behind SimpleTuner's own data backends: methods replaced on the instance, files left as they are."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from simpletuner_gh200.held.cache import MISSING, HeldCache
from simpletuner_gh200.held.source import normal
from simpletuner_gh200.seams.patch import Patch, wrap_method

logger = logging.getLogger("simpletuner_gh200")

T = TypeVar("T")
_reported: set[tuple[str, str]] = set()


def or_upstream(what: str, ours: Callable[[], T], instead: T, count: Callable[[str], None]) -> T:
    """What ``ours`` gives; ``instead``, which makes upstream do it, where it raises.

    An exception of ours never leads into SimpleTuner's loader: collate may run in its prefetching thread, which ends at
    one without a word, and the loop then waits for ever for the next batch.

    Reported once for each kind, and handed to ``count`` each time, with the reason.
    """
    try:
        return ours()
    except Exception as failure:  # whatever it is, upstream can still make the batch
        kind = (what, type(failure).__name__)
        count(f"failed: {type(failure).__name__}")
        if kind not in _reported:
            _reported.add(kind)
            logger.warning(
                "gh200: %s: SimpleTuner does it itself from its own files: %s", what, failure, exc_info=failure
            )
        return instead


@dataclass(frozen=True)
class Route:
    """Files under ``folder`` belong to ``cache``."""

    folder: str
    cache: HeldCache


class ServedBackend:
    """One backend instance with caches behind it. ``patches`` are installed and taken out by whoever made it."""

    def __init__(self, backend: Any, routes: Sequence[Route]) -> None:
        # The longest folder first: a cache may live inside another's.
        self._routes = sorted(
            ((route.folder.rstrip("/") + "/", route.cache) for route in routes), key=lambda item: -len(item[0])
        )
        self.patches: list[Patch] = [
            wrap_method(backend, "torch_load", self._load),
            wrap_method(backend, "torch_save", partial(self._change, 1, "original_location")),
            wrap_method(backend, "write", partial(self._change, 0, "filepath")),
            wrap_method(backend, "delete", partial(self._change, 0, "filepath")),
        ]

    def cache_of(self, path: str) -> HeldCache | None:
        for folder, cache in self._routes:
            if path.startswith(folder):
                return cache
        return None

    def _load(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = _path(args, kwargs, 0, "filename")
        cache = self.cache_of(path) if path is not None else None
        if cache is None or path is None:
            return wrapped(*args, **kwargs)
        return serve(cache, path, lambda: wrapped(*args, **kwargs))

    def _change(
        self, position: int, name: str, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any
    ) -> Any:
        """A file is written or deleted: its entry goes, and comes back with what is in the file by then."""
        path = _path(args, kwargs, position, name)
        cache = self.cache_of(path) if path is not None else None
        if cache is None or path is None:
            return wrapped(*args, **kwargs)
        cache.forget(path)
        try:
            return wrapped(*args, **kwargs)
        finally:
            cache.forget(path)  # again: a segment with the old content may have appeared meanwhile
            cache.wish(path)


class ServedGrounding:
    """A grounding embed cache, which reads its files past any backend."""

    def __init__(self, grounding: Any, cache: HeldCache) -> None:
        self._grounding = grounding
        self._cache = cache
        self.patches: list[Patch] = [wrap_method(grounding, "retrieve", self._retrieve)]

    def _retrieve(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = normal(self._grounding._cache_path(*args, **kwargs))
        return serve(self._cache, path, lambda: wrapped(*args, **kwargs))


def serve(cache: HeldCache, path: str, load: Callable[[], Any]) -> Any:
    """A hit, or what SimpleTuner's own ``load`` makes of the file, which is then held for the next time."""
    value = or_upstream("a cached entry", lambda: cache.get(path), MISSING, cache.statistics.miss)
    if value is not MISSING:
        return value
    _refuse_what_would_wait(path)
    value = load()
    cache.wish(path)
    return value


def _refuse_what_would_wait(path: str) -> None:
    """SimpleTuner opens whatever has a cache file's name; a FIFO's open waits for a writer, for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # SimpleTuner's own open says so, in the way its caches know
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        raise OSError(
            errno.EINVAL, "not a regular file, so there is nothing to load; remove it, and it is made again", path
        )


def _path(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str) -> str | None:
    """The cache file that a call is about; None where it is a file object or no cache file."""
    given = args[position] if len(args) > position else kwargs.get(name)
    if not isinstance(given, (str, os.PathLike)):
        return None
    path = normal(given)
    return path if path.endswith(".pt") else None
