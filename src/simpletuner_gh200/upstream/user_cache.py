"""What was found out once, kept in the user's cache: JSON entries by name, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import cache_folder


def cache_root() -> Path:
    """Our folder in the user's cache, private to the user; made when first asked for."""
    root = cache_folder()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def load(kind: str, entry: str) -> Any:
    """The entry, or None where there is none that can be read."""
    try:
        return json.loads(_path(kind, entry).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def store(kind: str, entry: str, content: Any) -> str | None:
    """Keep ``content``; why not, where it can't be kept (a read-only home, say), which only costs time."""
    try:
        target = _path(kind, entry)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, target)
    except OSError as refused:
        return f"{refused.filename or 'the cache'}: {refused.strerror}"
    return None


def _path(kind: str, entry: str) -> Path:
    return cache_root() / kind / f"{entry}.json"
