"""A comparison as text for a person, and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from simpletuner_gh200.upstream.diff import Comparison, SeamChange

LONG = 120
"""A longer diff of one seam is cut here unless everything was asked for."""


def review_lines(comparison: Comparison, *, full: bool = False) -> Iterator[str]:
    old, new = comparison.before.version, comparison.after.version
    yield f"SimpleTuner {old} -> {new}: {len(comparison.changes)} seams touched, {len(comparison.untouched)} untouched"
    yield from _feature_lines(comparison)
    for change in comparison.changes:
        yield ""
        yield from _seam_lines(change, full)
    if comparison.untouched:
        yield ""
        yield f"untouched: {', '.join(comparison.untouched)}"


def as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "from": comparison.before.version,
        "to": comparison.after.version,
        "ok": comparison.ok,
        "seams": [
            {
                "name": change.name,
                "where": change.where,
                "feature": ", ".join(change.features),
                "status": [change.before.status, change.after.status],
                "found": change.after.found,
                "diff": list(change.lines),
                "around": [asdict(near) for near in change.around],
            }
            for change in comparison.changes
        ],
        "untouched": list(comparison.untouched),
        "features": dict(comparison.after.features),
    }


def _feature_lines(comparison: Comparison) -> Iterator[str]:
    for name, verdict in comparison.after.features.items():
        if verdict != comparison.before.features[name]:
            yield f"  feature {name}: {comparison.before.features[name]} -> {verdict}"


def _seam_lines(change: SeamChange, full: bool) -> Iterator[str]:
    yield f"== {change.name}   ({change.where}; for {', '.join(change.features)})"
    if change.before.status == change.after.status == "ok":
        yield "   holds before and after"
    else:
        yield f"   {change.before.status} -> {change.after.status}: {change.after.found}"
    shown = change.lines if full else change.lines[:LONG]
    yield from (f"   {line}" for line in shown)
    if len(shown) < len(change.lines):
        yield f"   ... {len(change.lines) - len(shown)} more lines (--full)"
    for near in change.around:
        yield f"   around: {near.qualname} {near.change} (+{near.added} -{near.removed})"
