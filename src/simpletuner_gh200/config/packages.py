"""Where an ``import`` would find a package, without importing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def find_package(name: str, search_path: Sequence[str] | None = None) -> Path | None:
    """The folder of a top-level package (or the file of a module); None if there is none.

    Without a search path it is this interpreter's own import, editable installs included.
    """
    spec = _spec(name, search_path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and spec.origin != "built-in" else None


def _spec(name: str, search_path: Sequence[str] | None) -> ModuleSpec | None:
    if search_path is not None:
        return PathFinder.find_spec(name, list(search_path))
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
