"""What changed between two SimpleTuners in and around our seams, written to be read as a review.

Compared is syntax, not text: moved lines, comments and formatting are no change.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.check import check
from simpletuner_gh200.upstream.source import JoinedSource
from simpletuner_gh200.upstream.spec import SeamSpec, all_specs
from simpletuner_gh200.upstream.verdict import SeamRow, Verdict


@dataclass(frozen=True)
class Around:
    """A function near a seam that changed: one that uses it, or that a class with the seam gained or lost."""

    qualname: str
    change: str
    added: int
    removed: int


@dataclass(frozen=True)
class SeamChange:
    """One seam whose verdict, own code or users changed."""

    name: str
    where: str
    features: tuple[str, ...]
    before: SeamRow
    after: SeamRow
    lines: tuple[str, ...]
    """Unified diff of the seam's own definition."""
    around: tuple[Around, ...]

    @property
    def is_regression(self) -> bool:
        return self.before.status != "broken" and self.after.status == "broken"


@dataclass(frozen=True)
class ReleaseComparison:
    before: Verdict
    after: Verdict
    changes: tuple[SeamChange, ...]
    untouched: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not any(change.is_regression for change in self.changes)


def compare(
    old: JoinedSource, new: JoinedSource, *, versions: tuple[str | None, str | None] = (None, None)
) -> ReleaseComparison:
    specs = all_specs()
    before, after = (
        check(source, specs, version=version) for source, version in zip((old, new), versions, strict=True)
    )
    trees = {module: (_tree(old, module), _tree(new, module)) for module in {spec.module for spec in specs.values()}}
    changes = []
    for spec, was, now in zip(specs.values(), before.seams, after.seams, strict=True):
        change = _compare_seam(spec, was, now, *trees[spec.module])
        if change.lines or change.around or was.status != now.status:
            changes.append(change)
    named = {change.name for change in changes}
    return ReleaseComparison(before, after, tuple(changes), tuple(name for name in specs if name not in named))


def _compare_seam(spec: SeamSpec, was: SeamRow, now: SeamRow, old: ast.Module, new: ast.Module) -> SeamChange:
    lines = _diff(syntax.find(old, spec.qualname), syntax.find(new, spec.qualname), spec.qualname)
    around = tuple(_surroundings(spec, old, new))
    return SeamChange(spec.name, f"{spec.module}: {spec.qualname}", spec.features, was, now, lines, around)


def _surroundings(spec: SeamSpec, old: ast.Module, new: ast.Module) -> Iterator[Around]:
    before, after = dict(_functions(old)), dict(_functions(new))
    for qualname in sorted(before.keys() | after.keys()):
        one, other = before.get(qualname), after.get(qualname)
        if qualname == spec.qualname or not any(_uses(node, spec) for node in (one, other)):
            continue
        lines = _diff(one, other, qualname)
        if lines:
            added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
            yield Around(
                qualname, "added" if one is None else "removed" if other is None else "changed", added, removed
            )


def _uses(node: ast.AST | None, spec: SeamSpec) -> bool:
    owner, _, name = spec.qualname.rpartition(".")
    return node is not None and bool(syntax.mentions(node, f"self.{name}" if owner else name))


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in module.body:
        if isinstance(node, syntax.Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, syntax.Function))


def _diff(old: ast.AST | None, new: ast.AST | None, name: str) -> tuple[str, ...]:
    before, after = ([] if node is None else ast.unparse(node).splitlines() for node in (old, new))
    return tuple(difflib.unified_diff(before, after, fromfile=name, tofile=name, lineterm="", n=3))


def _tree(source: JoinedSource, module: str) -> ast.Module:
    """Unreadable or missing modules compare as empty; the verdicts say why."""
    try:
        return ast.parse(source.read(module) or b"")
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


# -- the comparison as text for a person, and as data

LONG = 120
"""A longer diff of one seam is cut here unless everything was asked for."""


def review_lines(comparison: ReleaseComparison, *, full: bool = False) -> Iterator[str]:
    old, new = comparison.before.version, comparison.after.version
    touched, others = counted(len(comparison.changes), "seam"), len(comparison.untouched)
    yield f"SimpleTuner {old} -> {new}: {touched} touched, {others} untouched"
    yield from _feature_lines(comparison)
    for change in comparison.changes:
        yield ""
        yield from _seam_lines(change, full)
    if comparison.untouched:
        yield ""
        yield f"untouched: {', '.join(comparison.untouched)}"


def as_json(comparison: ReleaseComparison) -> dict[str, Any]:
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
        "features": {name: str(status) for name, status in comparison.after.features.items()},
    }


def _feature_lines(comparison: ReleaseComparison) -> Iterator[str]:
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
