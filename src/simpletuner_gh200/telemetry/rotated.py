"""The lines of a file that grows and is rotated while it is read: each of them once, and in order.

Files are known by what they are, not by their names, which change under the reader's eyes. Of a rotation it counts on
what ``sink.JsonLines`` does: a file is not written any more once it is renamed, and the oldest is renamed first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

_MOST = 100
"""Older files that are looked for; there are never so many."""


class RotatedLines:
    """``path``, and the older files beside it: ``path.1`` is the youngest of those."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""
        """The last line as far as it is written."""
        self._file = self._oldest()

    def new(self) -> list[bytes]:
        """Whole lines that were added since the last call."""
        lines = self._take()
        while (following := self._following()) is not None:
            lines += self._take()  # what came before it was rotated and after we looked; now it is all there is
            lines += [self.rest] if self.rest.strip() else []
            self.rest = b""
            self._file.close()
            self._file = following
            lines += self._take()
        return lines

    def close(self) -> None:
        self._file.close()

    def _take(self) -> list[bytes]:
        *lines, self.rest = (self.rest + self._file.read()).split(b"\n")
        return [line for line in lines if line.strip()]

    def _following(self) -> BinaryIO | None:
        """The file that was begun when the one we read was rotated; None while it is still being written."""
        while (place := self._place()) != 0:
            try:
                if place is None:
                    return self._oldest()  # ours was removed: whatever is left was begun after it
                found = self._at(place - 1).open("rb")
            except FileNotFoundError:
                return None  # in the middle of a rotation; it is there next time
            if self._place() == place:  # else names have moved on since we looked
                return found
            found.close()
        return None

    def _place(self) -> int | None:
        """The number behind the name of the file that we read, 0 for ``path``; None if it was removed.

        Numbers only grow, and so does the one we look at: it can't slip past us.
        """
        ours = os.fstat(self._file.fileno())
        for number in range(_MOST if ours.st_nlink else 0):
            try:
                if os.path.samestat(ours, self._at(number).stat()):
                    return number
            except FileNotFoundError:
                continue
        return None

    def _oldest(self) -> BinaryIO:
        while True:
            number = self._highest()
            try:
                found = self._at(number).open("rb")
            except FileNotFoundError:
                if number == self._highest():
                    raise
                continue
            if number == self._highest():  # else it may have been renamed before it was opened
                return found
            found.close()

    def _highest(self) -> int:
        names = (re.fullmatch(re.escape(self.path.name) + r"\.(\d+)", name) for name in os.listdir(self.path.parent))
        return max((int(found[1]) for found in names if found), default=0)

    def _at(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
