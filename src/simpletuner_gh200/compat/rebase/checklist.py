"""What the workflow leaves beside the code: the log, the safety patches, the way back, the checklist."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner_gh200.compat.rebase.repository import Repository, write_whole
from simpletuner_gh200.compat.rebase.tree import HOME
from simpletuner_gh200.upstream.source import git

if TYPE_CHECKING:
    from simpletuner_gh200.compat.rebase.workflow import Journal

BRANCH = "gh200-reintegration"
LOG = "MERGE_LOG.txt"
PATCH = "gh200-current.patch"
ROLLBACK = "ROLLBACK.sh"
CHECKLIST = "GH200_REBASE_CHECKLIST.md"
UNCOMMITTED = "gh200-uncommitted.patch"
OURS = (LOG, PATCH, ROLLBACK, CHECKLIST, UNCOMMITTED)


def write_safety(repository: Repository, journal: Journal) -> list[str]:
    """The log with the names to go back to, the script that does it, and as patches the tree's difference from upstream
    and what was not committed, if anything. Returns the names of what is there."""
    root = repository.root
    fields = {
        "Backup branch": journal.backup_branch,
        "Original branch": journal.original_branch or "",
        "Original commit": journal.original_commit,
        "Onto": f"{journal.onto_ref} ({journal.onto_commit})",
        "New branch": BRANCH,
        "Started": journal.stamp,
    }
    write_whole(root / LOG, "".join(f"{name}: {value}\n" for name, value in fields.items()))
    write_whole(root / ROLLBACK, Path(__file__).with_name(ROLLBACK).read_bytes())
    write_whole(root / PATCH, git(root, "diff", "--binary", journal.base_commit, journal.original_commit).stdout)
    if journal.uncommitted and repository.head() == journal.original_commit:
        write_whole(root / UNCOMMITTED, repository.uncommitted_patch())
    if not journal.uncommitted:
        (root / UNCOMMITTED).unlink(missing_ok=True)  # of an earlier rebase: the script would apply it
    return [name for name in OURS if name == CHECKLIST or (root / name).exists()]


def record(repository: Repository, journal: Journal, line: str) -> None:
    """One more line in the log, and the checklist made anew; once there is a log."""
    path = repository.root / LOG
    if path.exists():
        with path.open("a", encoding="utf-8") as file:
            file.write(line.replace("\n", "; ").rstrip() + "\n")
        write_whole(repository.root / CHECKLIST, "\n".join(checklist(journal)) + "\n")


def checklist(journal: Journal) -> list[str]:
    """What users still have to do has an empty box."""
    rows = []
    for step in journal.steps:
        box = "[x]" if step.status == "done" else "[ ]"
        result = step.result.replace("|", "\\|").replace("\n", "<br>")
        rows.append(f"| {box} | {step.name} | {step.status} | {result} | {step.at} |")
    uncommitted = [
        "",
        f"Not committed when it started: {', '.join(journal.uncommitted)}. The changes are in `{UNCOMMITTED}`:",
        "",
        f"- [ ] carry over what you still want: `git apply --3way {UNCOMMITTED}`",
    ]
    return [
        "# GH200 rebase checklist",
        "",
        f"Onto `{journal.onto_ref}` ({journal.onto_commit[:12]}), from "
        f"`{journal.original_branch or 'a detached HEAD'}` ({journal.original_commit[:12]}). "
        f"Backup: `{journal.backup_branch}`. Way back: `./{ROLLBACK}` or `gh200 rebase rollback`.",
        "",
        "## Steps",
        "",
        "| | step | status | result | when |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "## Your tree against upstream",
        "",
        f"The changes are in `{PATCH}`; `{HOME}` is replaced by this package. Carry over what you still want:",
        "",
        *(f"- [ ] {path}" for path in journal.changed if not path.startswith(f"{HOME}/")),
        *(uncommitted if journal.uncommitted else ()),
        "",
        "## By hand",
        "",
        "- [ ] the three feature matrices, real runs of a tiny model: `scripts/test_upstream_features.sh` (manual "
        "validation, attention backends, audio where it runs), `scripts/test_gh200_features.sh`, "
        "`scripts/test_combined_features.sh`",
        f"- [ ] a baseline of before, on `{journal.backup_branch}`: "
        "`gh200 baseline capture --steps 1000 -o baseline -- --config CONFIG`",
        f"- [ ] the same on `{BRANCH}`, into `after`; then `gh200 baseline compare baseline after --tolerance 5%`",
        "- [ ] on a machine with a GPU: `./gh200_diagnostic.py --oversubscription-scale 1.5` and `./validate_uvm.py`",
        "- [ ] train your own configuration for a while; what an upgrade changes is in "
        "`documentation/gh200/compat/migration.md`",
    ]


def manifest(repository: Repository, journal: Journal, rows: list[tuple[str, str, str]]) -> str:
    """``docs/GH200_PATCH_MANIFEST.md``: what was brought in, how large, how risky; a commit each, so git knows.

    ``rows``: component, purpose, risk.
    """
    log = ("log", "--format=%x00%(trailers:key=GH200-Component,valueonly,separator=)", "--numstat")
    sizes: dict[str, list[str]] = {}
    for entry in repository.git(*log, f"{journal.onto_commit}..HEAD").split("\0")[1:]:
        component, *counted = filter(None, entry.splitlines())
        sizes[component] = [line.partition("\t")[0] for line in counted]
    lines = [
        f"| {name} | {purpose} | {len(sizes[name])} | {sum(map(int, filter(str.isdigit, sizes[name])))} | {risk} |"
        for name, purpose, risk in rows
    ]
    return "\n".join(
        [
            "# GH200 patch manifest",
            "",
            f"Brought into SimpleTuner at `{journal.onto_ref}` by `gh200 rebase`. One commit per row;",
            "upstream's files change in the hook's only.",
            "",
            "| component | purpose | files | lines | risk |",
            "|---|---|---|---|---|",
            *lines,
            "",
            "Install what it needs: `pip install -r simpletuner/gh200/requirements.txt`.",
            "",
        ]
    )
