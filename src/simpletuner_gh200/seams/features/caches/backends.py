"""Our tables behind SimpleTuner's own data backends: methods replaced on the instance, files left as they are."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.cache.fill import hold, read_through
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.source import normal, source_of
from simpletuner_gh200.cache.table import MISSING, Table
from simpletuner_gh200.seams.features.caches.own_way import or_upstream
from simpletuner_gh200.seams.patch import Patch, wrap_method


@dataclass(frozen=True)
class Route:
    """Files under ``folder`` belong to ``table``."""

    folder: str
    table: Table


class ServedBackend:
    """One backend instance with tables behind it. ``patches`` are installed and taken out by whoever made it."""

    def __init__(self, backend: Any, routes: Sequence[Route]) -> None:
        self.backend = backend
        # The longest folder first: a cache may live inside another's.
        self._routes = sorted(
            ((route.folder.rstrip("/") + "/", route.table) for route in routes), key=lambda item: -len(item[0])
        )
        self.patches: list[Patch] = [
            wrap_method(backend, "torch_load", self._load),
            wrap_method(backend, "torch_save", self._save),
            wrap_method(backend, "write", self._write),
            wrap_method(backend, "delete", self._delete),
        ]

    def table_of(self, path: str) -> Table | None:
        for folder, table in self._routes:
            if path.startswith(folder):
                return table
        return None

    def _load(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = _path(args, kwargs, 0, "filename")
        table = self.table_of(path) if path is not None else None
        if table is None or path is None:
            return wrapped(*args, **kwargs)
        value = or_upstream("a cached entry", lambda: table.get(path), MISSING, table.statistics.miss)
        if value is not MISSING:
            return value
        _refuse_what_would_wait(path)
        if not table.admits(key_of(path)):
            return wrapped(*args, **kwargs)
        return read_through(table, path, lambda: wrapped(*args, **kwargs))

    def _save(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = _path(args, kwargs, 1, "original_location")
        data = args[0] if args else kwargs.get("data")
        return self._writing(path, data, lambda: wrapped(*args, **kwargs))

    def _write(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = _path(args, kwargs, 0, "filepath")
        data = args[1] if len(args) > 1 else kwargs.get("data")
        return self._writing(path, data, lambda: wrapped(*args, **kwargs))

    def _delete(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = _path(args, kwargs, 0, "filepath")
        return self._withdrawing(path, lambda: wrapped(*args, **kwargs))

    def _writing(self, path: str | None, data: Any, write: Callable[[], Any]) -> Any:
        table = self.table_of(path) if path is not None else None
        if table is None or path is None:
            return write()
        known = os.path.lexists(path)
        result = self._withdrawing(path, write)
        # A file that was there before may be written by another rank at the same time: the next load sorts that out.
        if not known and table.admits(key_of(path)):
            source = source_of(path)
            if source is not None:
                hold(table, path, data, source)
        return result

    def _withdrawing(self, path: str | None, change: Callable[[], Any]) -> Any:
        table = self.table_of(path) if path is not None else None
        if table is None or path is None:
            return change()
        table.invalidate(path)
        try:
            return change()
        finally:
            # Again: a reader may have taken the old content in meanwhile.
            table.invalidate(path)


class ServedGrounding:
    """A grounding embed cache, which reads its files past any backend."""

    def __init__(self, cache: Any, table: Table) -> None:
        self._cache = cache
        self._table = table
        self.patches: list[Patch] = [wrap_method(cache, "retrieve", self._retrieve)]

    def _retrieve(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = normal(self._cache._cache_path(*args, **kwargs))
        value = or_upstream("a cached entry", lambda: self._table.get(path), MISSING, self._table.statistics.miss)
        if value is not MISSING:
            return value
        return read_through(self._table, path, lambda: wrapped(*args, **kwargs))


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
