"""What a fork did to upstream's files: which of its hunks our seams replace, and what it had deleted.

A hunk is called replaced only where three things agree: it speaks of what the earlier system was about, it lies in a
place that a seam of ours wraps (or imports that system), and it takes nothing of upstream's away. Everything else is
for people: calling someone's work replaced would drop it, looking at a hunk too many costs a minute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from simpletuner_gh200.compat.rebase.repository import Repository
from simpletuner_gh200.compat.rebase.tree import HOME
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.source import candidate_paths
from simpletuner_gh200.upstream.spec import all_specs

SUBJECT = re.compile(r"gh200|uvm|unified_memory|in_memory|effective_batch|ramp_?up|cache_config", re.IGNORECASE)
HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@.*\n((?:[-+\\].*\n?)*)", re.MULTILINE)
MODULE = "module level"
SHOWN = 3
"""Lines of a hunk that the checklist quotes."""


def examine(repository: Repository, base: str, fork: str) -> dict[str, Any]:
    """``edits`` to upstream's files, and the fork's ``own`` ones; JSON-ready."""
    fields = repository.names("diff", "--name-status", "--no-renames", "-z", base, fork)
    changed = dict(zip(fields[1::2], fields[::2], strict=True))
    edits = [_edit(repository, base, fork, path, kind != "D") for path, kind in changed.items() if kind != "A"]
    return {"base": base, "edits": edits, "own": [path for path, kind in changed.items() if kind == "A"]}


def by_hand(report: Mapping[str, Any]) -> int:
    """Files in which somebody has to look at something."""
    return sum(not edit["hunks"] or any(not hunk["replaced_by"] for hunk in edit["hunks"]) for edit in report["edits"])


def _edit(repository: Repository, base: str, fork: str, path: str, kept: bool) -> dict[str, Any]:
    """Without hunks, as a deleted or binary file is reported, the whole of it has to be looked at."""
    before, after = _functions(repository.text(base, path)), _functions(repository.text(fork, path))
    diff = repository.git("diff", "--unified=0", "--no-renames", base, fork, "--", path)
    seams = {spec.qualname: name for name, spec in all_specs().items() if path in candidate_paths(spec.module)}
    hunks = [judge(hunk, before, after, seams) for hunk in HUNK.finditer(diff)]
    bodies = [{name: set(ast.unparse(node).splitlines()) for name, node in side.items()} for side in (before, after)]
    return {
        "path": path,
        "added": sum(hunk["added"] for hunk in hunks),
        "removed": sum(hunk["removed"] for hunk in hunks),
        "hunks": hunks if kept else [],
        "lost": [name for name in before if name not in after],
        "cut": [name for name, lines in bodies[0].items() if name in after and lines - bodies[1][name]],
    }


def judge(
    hunk: re.Match[str], before: Mapping[str, syntax.Function], after: Mapping[str, syntax.Function],
    seams: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """``seams``: the qualified names that our seams wrap in this file, with each seam's name."""
    changed = hunk[3].splitlines()
    added, removed = ([line[1:] for line in changed if line.startswith(sign)] for sign in "+-")
    line, functions = (int(hunk[2]), after) if added else (int(hunk[1]), before)
    where = next((name for name, node in functions.items() if _first(node) <= line <= (node.end_lineno or 0)), MODULE)
    return {
        "line": line,
        "where": where,
        "added": len(added),
        "removed": len(removed),
        "replaced_by": _replacing(added, removed, where, seams),
        "shown": [text.strip() for text in added or removed if text.strip()][:SHOWN],
    }


def _replacing(added: list[str], removed: list[str], where: str, seams: Mapping[str, str]) -> list[str]:
    written = [line for line in added if line.strip()]
    about = [line for line in written if SUBJECT.search(line)]
    takes_away = any(line.strip() and not SUBJECT.search(line) for line in removed)
    if takes_away or not about or 2 * len(about) < len(written):
        return []
    if where == MODULE:
        imports = all(line.lstrip().startswith(("import ", "from ")) for line in about)
        return sorted(set(seams.values())) if imports and len(about) == len(written) else []
    return [seams[where]] if where in seams else []


def _functions(text: bytes) -> dict[str, syntax.Function]:
    """By qualified name; none where it is not Python."""
    try:
        return dict(syntax.functions(ast.parse(text)))
    except (SyntaxError, ValueError):
        return {}


def _first(node: syntax.Function) -> int:
    return min(part.lineno for part in (node, *node.decorator_list))


def checklist_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as it stands in the checklist."""
    if not report["edits"] and not report["own"]:
        yield "Your tree has no changes of its own against upstream."
        return
    yield "| upstream file | edit | replaced by seams | upstream code deleted |"
    yield "|---|---|---|---|"
    for edit in report["edits"]:
        seams = sorted({seam for hunk in edit["hunks"] for seam in hunk["replaced_by"]})
        done = sum(bool(hunk["replaced_by"]) for hunk in edit["hunks"])
        replaced = f"{done} of {len(edit['hunks'])} hunks" + (f": {', '.join(seams)}" if seams else "")
        gone = [f"{name} (whole)" for name in edit["lost"]] + [f"lines in {name}" for name in edit["cut"]]
        yield f"| {edit['path']} | +{edit['added']} -{edit['removed']} | {replaced} | {', '.join(gone) or 'nothing'} |"
    yield from ("", "Nothing of ours stands for these; carry over what you still want:", "")
    for edit in report["edits"]:
        if not edit["hunks"]:
            yield f"- [ ] {edit['path']}: the whole file"
        for hunk in edit["hunks"]:
            if not hunk["replaced_by"]:
                text = " / ".join(hunk["shown"]).replace("`", "'")
                place, size = f"{edit['path']}:{hunk['line']}", f"+{hunk['added']} -{hunk['removed']}"
                yield f"- [ ] {place}, {hunk['where']} ({size}): `{text}`"
    others = [path for path in report["own"] if not path.startswith(f"{HOME}/")]
    ours = len(report["own"]) - len(others)
    yield from (
        "",
        f"Your own files: {ours} under {HOME}, replaced by this package; {len(others)} elsewhere, to carry over",
    )
    yield from (f"- [ ] {path}" for path in others)
