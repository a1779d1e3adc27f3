"""What a staging did: the summary line, and the JSON that names every broken file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simpletuner_gh200.store.codecs import NAMES, CodecChoice
from simpletuner_gh200.store.discovery import Listing, extension_of
from simpletuner_gh200.store.image_check import image_formats
from simpletuner_gh200.store.index import ABSENT, CHUNKED, Rows
from simpletuner_gh200.store.problems import FileProblems
from simpletuner_gh200.units import counted, format_bytes, format_seconds


@dataclass(frozen=True)
class Damage:
    """Broken files of one kind, and how many of that kind there are."""

    kind: str
    broken: int
    files: int

    @property
    def rate(self) -> float:
        return self.broken / max(self.files, self.broken, 1)

    @classmethod
    def worst(cls, listing: Listing) -> Damage:
        """Of the images, which are what a run trains on, or of all files together."""
        broken = listing.problems.broken_endings
        pictures = image_formats() if broken else {}
        images = cls(
            "images",
            sum(count for ending, count in broken.items() if extension_of(ending) in pictures),
            sum(totals.files for extension, totals in listing.extensions.items() if extension in pictures),
        )
        return max(images, cls("all files", broken.total(), listing.files), key=lambda damage: damage.rate)


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
            damage=Damage.worst(listing),
        )

    @property
    def corruption_rate(self) -> float:
        """Over all files of a kind, looked at or not: one that can't be read says nothing about the others."""
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
