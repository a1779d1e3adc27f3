"""Files that could not be staged or do not hold what their name says: why, and what it means for the run."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from simpletuner_gh200.telemetry.printable import printable

Reason = Literal[
    "unreadable", "vanished", "broken link", "unstable", "empty image", "image does not open", "image does not decode"
]

BROKEN: frozenset[Reason] = frozenset({"unreadable", "empty image", "image does not open", "image does not decode"})
"""Reasons that count towards ``max_corruption_rate``. A file that vanished, a dangling link, and a file that somebody
was writing at the time are no damage: whoever wants them asks the disk."""

KEPT = 10_000
"""So many are kept one by one; beyond that only counted, or a wrong path could fill the memory with complaints."""


@dataclass(frozen=True)
class FileProblem:
    path: bytes
    reason: Reason
    detail: str = ""

    @classmethod
    def from_error(cls, path: bytes, error: OSError, *, link: bool = False) -> FileProblem:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        if (gone and link) or error.errno == errno.ELOOP:
            return cls(path, "broken link", error.strerror or "")
        return cls(path, "vanished" if gone else "unreadable", error.strerror or str(error))

    def as_json(self) -> dict[str, Any]:
        return {"path": os.fsdecode(self.path), "reason": self.reason, "detail": self.detail}

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class FileProblems:
    """A bounded list with full counts. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[FileProblem] = []
        self.counts: Counter[str] = Counter()
        self.broken_endings: Counter[bytes] = Counter()
        """How many are broken, by the ending of their names, dot included."""

    def add(self, problem: FileProblem) -> None:
        with self._lock:
            self.counts[problem.reason] += 1
            if problem.reason in BROKEN:
                self.broken_endings[_ending(problem.path)] += 1
            if len(self._kept) < KEPT:
                self._kept.append(problem)

    def __iter__(self) -> Iterator[FileProblem]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return self.counts.total()

    @property
    def broken(self) -> int:
        return sum(count for reason, count in self.counts.items() if reason in BROKEN)


def _ending(path: bytes) -> bytes:
    """Bounded, since names may be anything: none where it would be long."""
    ending = path[path.rfind(b".") :]
    return ending if len(ending) <= 17 and b"/" not in ending else b""
