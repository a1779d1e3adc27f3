"""Records into a file, one JSON object a line: for its owner only, and never a reason to stop training."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("simpletuner_gh200")


class JsonLines:
    """Appends to ``path``, made with mode 0600.

    ``write`` doesn't raise: what can't be written is dropped and counted, with one warning for the whole run. Writing
    is tried again with each record, so that a disk that has room again goes on being used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._fd: int | None = None
        self._torn = False

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            self._append(_line(record))
        except OSError as refused:
            if not self.dropped:
                words = "gh200: telemetry can't be written to %s (%s); training goes on"
                logger.warning(words, self.path, refused.strerror)
            self.dropped += 1

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _append(self, line: bytes) -> None:
        fd = self._opened()
        if self._torn:
            line = b"\n" + line  # the end of a line is missing from when the disk was full
        written = os.write(fd, line)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(28, "only part of a record could be written")

    def _opened(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
            os.fchmod(self._fd, 0o600)  # one that was there already may be more open
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        return self._fd


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        # Looking for them in every record would cost more than writing it.
        text = json.dumps(finite(record), separators=(",", ":"), default=str)
    return text.encode() + b"\n"


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON object, whole or not at all. Raises OSError; a draft that a kill leaves is swept by the next run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # a link that somebody put there is not written through
    try:
        with draft.open("x", encoding="utf-8") as file:
            json.dump(finite(content), file, indent=1, default=str)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_whole(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
