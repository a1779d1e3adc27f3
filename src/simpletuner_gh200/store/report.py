"""What a staging did: the summary line, and the JSON that names every broken file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simpletuner_gh200.store.codecs import NAMES, CodecChoice
from simpletuner_gh200.store.discovery import Listing
from simpletuner_gh200.store.index import ABSENT, CHUNKED, Rows
from simpletuner_gh200.store.problems import FileProblems
from simpletuner_gh200.units import format_bytes, format_seconds


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

    @classmethod
    def of(
        cls, listing: Listing, rows: Rows, held: int, choice: CodecChoice, images_checked: int, seconds: float
    ) -> StagingReport:
        form = rows.columns["form"]
        present = form != ABSENT
        numbers, counts = np.unique(form[present] & ~np.uint8(CHUNKED), return_counts=True)
        return cls(
            files=listing.files,
            staged=int(present.sum()),
            size=int(rows.columns["size"][present].sum()),
            held=held,
            images_checked=images_checked,
            seconds=seconds,
            forms={NAMES[int(number)]: int(count) for number, count in zip(numbers, counts, strict=True)},
            choices=choice.reasons,
            problems=listing.problems,
        )

    @property
    def judged(self) -> int:
        """Files that could have been found broken: the images looked at, and whatever could not be read."""
        return self.images_checked + self.problems.counts["unreadable"] + self.problems.counts["unstable"]

    @property
    def corruption_rate(self) -> float:
        return self.problems.broken / self.judged if self.judged else 0.0

    def line(self) -> str:
        speed = self.size / max(self.seconds, 1e-9)
        text = (
            f"{self.staged} files, {format_bytes(self.size)} held in {format_bytes(self.held)}, "
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
