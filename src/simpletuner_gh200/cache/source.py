"""Cache files as we know them: by absolute path, and by how they looked when their content was taken."""

from __future__ import annotations

import os
import stat
from typing import Any

from simpletuner_gh200.cache.slots import ORDINARY, source_words


def normal(path: Any) -> str:
    """The absolute path under which an entry is known, whatever form the caller uses."""
    text = path if type(path) is str else os.fsdecode(path)
    # Most are normal already, and asking the long way costs more than a lookup.
    if text[:1] == "/" and "//" not in text and "/." not in text and text[-1] != "/":
        return text
    return os.path.abspath(text)


def ordinary(path: str) -> int:
    """``ORDINARY`` for a file with one name that is no link, else 0."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return ORDINARY if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0


def source_of(path: str) -> tuple[int, int] | None:
    """How the file looks now, in the words of a slot; None if it isn't there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return source_words(found.st_size, found.st_mtime_ns, found.st_ino)
