"""What a fork did to upstream's files: which of its hunks our seams replace, and what it had deleted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.operate.rebase import hunks
from simpletuner_gh200.operate.rebase.components import HOME
from simpletuner_gh200.operate.rebase.repository import Repository
from simpletuner_gh200.upstream.git import git
from simpletuner_gh200.upstream.source import candidate_paths
from simpletuner_gh200.upstream.spec import all_specs


@dataclass(frozen=True)
class FileEdit:
    """One upstream file the fork changed."""

    path: str
    added: int
    removed: int
    hunks: tuple[hunks.Hunk, ...]
    """Empty for a deleted or binary file: then the whole of it has to be looked at by hand."""
    lost: tuple[str, ...]
    """Functions and classes of upstream's that the fork deleted."""
    cut: tuple[str, ...]
    """Functions it kept, but with lines of upstream's deleted or changed."""


@dataclass(frozen=True)
class ForkReport:
    """``own`` are files the fork added; those under simpletuner/gh200 are replaced by this package."""

    base: str | None
    edits: tuple[FileEdit, ...]
    own: tuple[str, ...]

    @property
    def by_hand(self) -> int:
        """Places that somebody has to look at."""
        return sum(not edit.hunks or any(not hunk.replaced_by for hunk in edit.hunks) for edit in self.edits)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(repository: Repository, fork: str, onto: str) -> ForkReport:
    """Compare the fork with the commit it grew from."""
    found = git(repository.root, "merge-base", fork, onto, check=False)
    base = found.stdout.decode().strip() or None
    start = base or onto
    changed = dict(_changed(repository, start, fork))
    edits = [_edit(repository, start, fork, path) for path, kind in changed.items() if kind in "MD"]
    own = tuple(path for path, kind in changed.items() if kind == "A")
    return ForkReport(base, tuple(edits), own)


def checklist_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as it stands in the checklist."""
    if not report.get("edits") and not report.get("own"):
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
    yield ""
    yield "Nothing of ours stands for these; carry over what you still want:"
    yield ""
    for edit in report["edits"]:
        if not edit["hunks"]:
            yield f"- [ ] {edit['path']}: the whole file"
        for hunk in edit["hunks"]:
            if not hunk["replaced_by"]:
                text = " / ".join(hunk["shown"]).replace("`", "'")
                place, size = f"{edit['path']}:{hunk['line']}", f"+{hunk['added']} -{hunk['removed']}"
                yield f"- [ ] {place}, {hunk['where']} ({size}): `{text}`"
    ours = [path for path in report["own"] if path.startswith(f"{HOME}/")]
    others = [path for path in report["own"] if not path.startswith(f"{HOME}/")]
    yield ""
    yield f"Your own files: {len(ours)} under {HOME}, replaced by this package; {len(others)} elsewhere, to carry over"
    yield from (f"- [ ] {path}" for path in others)


def _changed(repository: Repository, base: str, fork: str) -> Iterator[tuple[str, str]]:
    listing = git(repository.root, "diff", "--name-status", "--no-renames", "-z", base, fork).stdout
    fields = listing.decode(errors="surrogateescape").split("\0")
    for kind, path in zip(fields[::2], fields[1::2], strict=False):
        yield path, kind


def _edit(repository: Repository, base: str, fork: str, path: str) -> FileEdit:
    counts = repository.git("diff", "--numstat", "--no-renames", base, fork, "--", path).split("\t")
    added, removed = (int(count) if count.isdigit() else 0 for count in counts[:2])
    before, after = _text(repository, base, path), _text(repository, fork, path)
    lost, cut = _deletions(before, after) if _is_python(path) else ((), ())
    diff = git(repository.root, "diff", "--unified=0", "--no-renames", base, fork, "--", path).stdout
    changes = hunks.parse(diff.decode(errors="replace")) if after else iter(())
    return FileEdit(path, added, removed, hunks.judge(changes, before, after, _seams_in(path)), lost, cut)


def _seams_in(path: str) -> dict[str, str]:
    return {spec.qualname: name for name, spec in all_specs().items() if path in candidate_paths(spec.module)}


def _deletions(before: bytes, after: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    old, new = dict(_bodies(before)), dict(_bodies(after))
    lost = tuple(name for name in old if name not in new)
    cut = tuple(name for name in old if name in new and old[name] - new[name])
    return lost, cut


def _bodies(text: bytes) -> Iterator[tuple[str, set[str]]]:
    """Each function with its lines, formatting and comments aside."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{part.name}", set(ast.unparse(part).splitlines())
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, set(ast.unparse(node).splitlines())


def _text(repository: Repository, commit: str, path: str) -> bytes:
    return git(repository.root, "cat-file", "blob", f"{commit}:{path}", check=False).stdout


def _is_python(path: str) -> bool:
    return Path(path).suffix == ".py"
