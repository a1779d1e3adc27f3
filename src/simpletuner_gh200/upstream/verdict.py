"""What a check found: one row per seam, and what that means for each feature."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from simpletuner_gh200.upstream.features import Status, consequences


@dataclass(frozen=True)
class SeamRow:
    """One seam on one release. ``status``: ok, broken, absent (and optional), skipped (its package is not there)."""

    name: str
    status: str
    found: str
    expected: str
    feature: str
    """The features it carries, or if it is broken those that are lost, separated by commas."""


@dataclass(frozen=True)
class Verdict:
    """A release against the contract."""

    version: str
    accelerate: str | None
    seams: tuple[SeamRow, ...]
    features: dict[str, Status]

    @property
    def ok(self) -> bool:
        return all(row.status != "broken" for row in self.seams)

    @property
    def broken(self) -> tuple[SeamRow, ...]:
        return tuple(row for row in self.seams if row.status == "broken")

    def against(self, feature: str) -> list[str]:
        """What speaks against a feature on this release."""
        reason = self.features[feature].reason
        return [] if reason is None else [reason]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "accelerate": self.accelerate,
            "ok": self.ok,
            "seams": [asdict(row) for row in self.seams],
            "features": {name: str(status) for name, status in self.features.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        rows = tuple(SeamRow(**row) for row in data["seams"])
        features = {name: Status.parse(text) for name, text in data["features"].items()}
        return cls(data["version"], data["accelerate"], rows, features)


def make_verdict(version: str, accelerate: str | None, rows: tuple[SeamRow, ...]) -> Verdict:
    broken: dict[str, str] = {}
    for row in rows:
        if row.status == "broken":
            for feature in row.feature.split(", "):
                broken.setdefault(feature, f"seam {row.name}: {row.found}")
    return Verdict(version, accelerate, rows, consequences(broken))
