"""What a staging did: the summary line, and the files that could not be staged or do not hold what their name says."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from simpletuner_gh200.held.image_check import image_formats
from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.units import counted, format_bytes, format_seconds

Reason = Literal[
    "unreadable", "vanished", "broken link", "unstable", "empty image", "image does not open", "image does not decode"
]

BROKEN: frozenset[Reason] = frozenset({"unreadable", "empty image", "image does not open", "image does not decode"})
"""Reasons that count towards ``max_corruption_rate``. A file that vanished, a dangling link, and a file that somebody
was writing at the time are no damage: whoever wants them asks the disk."""

KEPT = 10_000
"""So many are kept one by one; beyond that only counted, or a wrong path could fill the memory with complaints."""


def extension_of(name: bytes) -> str:
    """``b"a/b.JPG"`` -> ``jpg``; the empty text where there is none, or one that is too long to be one."""
    _stem, dot, ending = name.rpartition(b".")
    return ending.decode("ascii", "replace").lower() if dot and len(ending) <= 16 and b"/" not in ending else ""


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
        self.broken_extensions: Counter[str] = Counter()

    def add(self, problem: FileProblem) -> None:
        with self._lock:
            self.counts[problem.reason] += 1
            if problem.reason in BROKEN:
                self.broken_extensions[extension_of(problem.path)] += 1
            if len(self._kept) < KEPT:
                self._kept.append(problem)

    def __iter__(self) -> Iterator[FileProblem]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return self.counts.total()

    @property
    def broken(self) -> int:
        return self.broken_extensions.total()


@dataclass(frozen=True)
class Damage:
    """Broken files of one kind, and how many of that kind there are, looked at or not."""

    kind: str
    broken: int
    files: int

    @property
    def rate(self) -> float:
        return self.broken / max(self.files, self.broken, 1)

    @classmethod
    def worst(cls, problems: FileProblems, files: dict[str, int]) -> Damage:
        """Of the images, which are what a run trains on, or of all files together. ``files``: by extension."""
        broken = problems.broken_extensions
        pictures = image_formats() if broken else {}
        images = cls(
            "images",
            sum(count for extension, count in broken.items() if extension in pictures),
            sum(count for extension, count in files.items() if extension in pictures),
        )
        return max(images, cls("all files", broken.total(), sum(files.values())), key=lambda damage: damage.rate)


@dataclass(frozen=True)
class StagingReport:
    files: int
    staged: int
    size: int
    held: int
    images_checked: int
    seconds: float
    forms: dict[str, int]
    """Files by codec."""
    choices: dict[str, str]
    problems: FileProblems
    damage: Damage

    @property
    def corruption_rate(self) -> float:
        return self.damage.rate

    def line(self) -> str:
        speed = self.size / max(self.seconds, 1e-9)
        text = (
            f"{counted(self.staged, 'file')}, {format_bytes(self.size)} held in {format_bytes(self.held)}, "
            f"{format_seconds(self.seconds)}, {format_bytes(speed)}/s"
        )
        if self.problems.counts:
            text += "; " + ", ".join(f"{count} {reason}" for reason, count in sorted(self.problems.counts.items()))
        return text

    def as_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "staged": self.staged,
            "bytes": self.size,
            "held_bytes": self.held,
            "seconds": round(self.seconds, 3),
            "gb_per_s": round(self.size / max(self.seconds, 1e-9) / 1e9, 3),
            "codecs": self.forms,
            "choices": self.choices,
            "images_checked": self.images_checked,
            "corruption_rate": self.corruption_rate,
            "broken": self.problems.broken,
            "problem_counts": dict(self.problems.counts),
            "problems": [problem.as_json() for problem in self.problems],
        }
