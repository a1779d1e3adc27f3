"""What changed between two SimpleTuners in and around our seams, written to be read as a review.

Compared is syntax, not text: moved lines, comments and formatting are no change.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.check import check
from simpletuner_gh200.upstream.patterns import mentions
from simpletuner_gh200.upstream.source import JoinedSource
from simpletuner_gh200.upstream.spec import SeamSpec, all_specs

LONG = 120
"""A longer diff of one seam is cut here unless everything was asked for."""


def compare(old: JoinedSource, new: JoinedSource) -> dict[str, Any]:
    """``ok`` unless a seam that held is broken; ``seams`` are those whose verdict, own code or users changed."""
    specs = all_specs()
    before, after = check(old, specs), check(new, specs)
    trees = {module: (_tree(old, module), _tree(new, module)) for module in {spec.module for spec in specs.values()}}
    seams = []
    for spec, was, now in zip(specs.values(), before.seams, after.seams, strict=True):
        old_tree, new_tree = trees[spec.module]
        lines = _diff(syntax.find(old_tree, spec.qualname), syntax.find(new_tree, spec.qualname), spec.qualname)
        around = list(_around(spec, dict(syntax.functions(old_tree)), dict(syntax.functions(new_tree))))
        if lines or around or was.status != now.status:
            seams.append(
                {
                    "name": spec.name,
                    "where": f"{spec.module}: {spec.qualname}",
                    "feature": ", ".join(spec.features),
                    "status": [was.status, now.status],
                    "found": now.found,
                    "diff": lines,
                    "around": around,
                }
            )
    changed = {seam["name"] for seam in seams}
    return {
        "from": before.version,
        "to": after.version,
        "ok": not any(seam["status"][1] == "broken" != seam["status"][0] for seam in seams),
        "seams": seams,
        "untouched": [name for name in specs if name not in changed],
        "features": {name: str(status) for name, status in after.features.items()},
        "features_changed": {
            name: [str(before.features[name]), str(now)]
            for name, now in after.features.items()
            if now != before.features[name]
        },
    }


def _around(
    spec: SeamSpec, before: Mapping[str, syntax.Function], after: Mapping[str, syntax.Function]
) -> Iterator[dict[str, Any]]:
    """Functions that use the seam and changed, came or went."""
    owner, _, name = spec.qualname.rpartition(".")
    seam = f"self.{name}" if owner else name
    for qualname in sorted(before.keys() | after.keys()):
        one, other = before.get(qualname), after.get(qualname)
        used = any(node is not None and mentions(node, seam) for node in (one, other))
        lines = _diff(one, other, qualname) if used and qualname != spec.qualname else []
        if lines:
            change = "added" if one is None else "removed" if other is None else "changed"
            added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
            yield {"qualname": qualname, "change": change, "added": added, "removed": removed}


def _diff(old: ast.AST | None, new: ast.AST | None, name: str) -> list[str]:
    before, after = ([] if node is None else ast.unparse(node).splitlines() for node in (old, new))
    return list(difflib.unified_diff(before, after, fromfile=name, tofile=name, lineterm="", n=3))


def _tree(source: JoinedSource, module: str) -> ast.Module:
    """Unreadable or missing modules compare as empty; the verdicts say why."""
    try:
        return ast.parse(source.read(module) or b"")
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def review_lines(found: Mapping[str, Any], *, full: bool = False) -> Iterator[str]:
    """The comparison as text for people."""
    touched, others = counted(len(found["seams"]), "seam"), len(found["untouched"])
    yield f"SimpleTuner {found['from']} -> {found['to']}: {touched} touched, {others} untouched"
    for name, (was, now) in found["features_changed"].items():
        yield f"  feature {name}: {was} -> {now}"
    for seam in found["seams"]:
        yield ""
        yield from _seam_lines(seam, full)
    if found["untouched"]:
        yield ""
        yield f"untouched: {', '.join(found['untouched'])}"


def _seam_lines(seam: Mapping[str, Any], full: bool) -> Iterator[str]:
    yield f"== {seam['name']}   ({seam['where']}; for {seam['feature']})"
    was, now = seam["status"]
    yield "   holds before and after" if was == now == "ok" else f"   {was} -> {now}: {seam['found']}"
    shown = seam["diff"] if full else seam["diff"][:LONG]
    yield from (f"   {line}" for line in shown)
    if len(shown) < len(seam["diff"]):
        yield f"   ... {len(seam['diff']) - len(shown)} more lines (--full)"
    for near in seam["around"]:
        yield f"   around: {near['qualname']} {near['change']} (+{near['added']} -{near['removed']})"
