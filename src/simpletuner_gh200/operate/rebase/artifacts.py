"""What the workflow leaves beside the code: the log, the safety patch, the way back, the checklist."""

from __future__ import annotations

from pathlib import Path

from simpletuner_gh200.operate.rebase.fork_report import checklist_lines
from simpletuner_gh200.operate.rebase.journal import Journal, write_whole
from simpletuner_gh200.operate.rebase.repository import Repository
from simpletuner_gh200.upstream.git import git

LOG = "MERGE_LOG.txt"
PATCH = "gh200-current.patch"
ROLLBACK = "ROLLBACK.sh"
CHECKLIST = "GH200_REBASE_CHECKLIST.md"
UNCOMMITTED = "gh200-uncommitted.patch"
OURS = (LOG, PATCH, ROLLBACK, CHECKLIST, UNCOMMITTED)
BRANCH = "gh200-reintegration"

ROLLBACK_TEXT = """#!/usr/bin/env bash
# Goes back to where `gh200 rebase start` found this checkout. Works without gh200; asks first unless given --yes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
field() { sed -n "s/^$1: //p" MERGE_LOG.txt | head -n 1; }
backup=$(field "Backup branch")
original=$(field "Original branch")
if [[ -z "$backup" ]] || ! git show-ref --verify --quiet "refs/heads/$backup"; then
  echo "MERGE_LOG.txt names no backup branch that exists" >&2
  exit 1
fi
if [[ "${1:-}" != "--yes" ]]; then
  echo "Uncommitted changes are lost. The backup is $backup."
  read -rp "Leave the current branch for ${original:-$backup}? (y/N) " answer
  [[ "$answer" == [yY] ]] || exit 1
fi
git switch --discard-changes "${original:-$backup}"
if [[ "$(git rev-parse HEAD)" != "$(git rev-parse "$backup")" ]]; then
  echo "note: ${original:-$backup} has moved since; the state of then is in $backup" >&2
fi
if [[ -s gh200-uncommitted.patch ]] && ! git apply gh200-uncommitted.patch; then
  echo "note: what was not committed then is in gh200-uncommitted.patch" >&2
fi
"""


def write_safety(repository: Repository, journal: Journal) -> None:
    """The log with the names to go back to, the script that does it, and as patches the tree's difference from upstream
    and what was not committed."""
    root = repository.root
    write_whole(root / LOG, _log_head(journal))
    write_whole(root / ROLLBACK, ROLLBACK_TEXT, executable=True)
    base = git(root, "merge-base", journal.original_commit, journal.onto_commit, check=False).stdout.decode().strip()
    patch = git(root, "diff", "--binary", base or journal.onto_commit, journal.original_commit).stdout
    _write_patch(root / PATCH, patch)
    if journal.uncommitted and repository.head() == journal.original_commit:
        _write_patch(root / UNCOMMITTED, repository.uncommitted_patch())


def _write_patch(path: Path, patch: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(patch)
    temporary.replace(path)


def append_log(root: Path, line: str) -> None:
    path = root / LOG
    if path.exists():
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def write_checklist(root: Path, journal: Journal) -> None:
    write_whole(root / CHECKLIST, "\n".join(checklist(journal)) + "\n")


def checklist(journal: Journal) -> list[str]:
    """Generated after every step; what a person still has to do has an empty box."""
    lines = [
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
    ]
    for step in journal.steps:
        box = "[x]" if step.status == "done" else "[ ]"
        result = step.result.replace("|", "\\|").replace("\n", "<br>")
        lines.append(f"| {box} | {step.name} | {step.status} | {result} | {step.at} |")
    lines += ["", "## Your tree against upstream", ""]
    lines += list(checklist_lines(journal.fork)) if journal.fork else ["Not looked at yet."]
    if journal.uncommitted:
        lines += [
            "",
            f"Not committed when it started: {', '.join(journal.uncommitted)}. The changes are in `{UNCOMMITTED}`:",
        ]
        lines += ["", f"- [ ] carry over what you still want: `git apply --3way {UNCOMMITTED}`"]
    lines += ["", "## By hand", ""]
    return [
        *lines,
        "- [ ] smoke runs and the three feature matrices (manual validation, attention backends, audio where it runs): "
        "`gh200 rebase test --runs`",
        f"- [ ] a baseline of before, on `{journal.backup_branch}`: "
        "`gh200 baseline capture --steps 1000 -o baseline -- --config CONFIG`",
        f"- [ ] the same on `{BRANCH}`, into `after`; then `gh200 baseline compare baseline after --tolerance 5%`",
        "- [ ] on a machine with a GPU: `./gh200_diagnostic.py --oversubscription-scale 1.5` and `./validate_uvm.py`",
        "- [ ] train your own configuration for a while; what an upgrade changes is in "
        "`documentation/gh200/operating/migration.md`",
    ]


def _log_head(journal: Journal) -> str:
    fields = {
        "Backup branch": journal.backup_branch,
        "Original branch": journal.original_branch or "",
        "Original commit": journal.original_commit,
        "Onto": f"{journal.onto_ref} ({journal.onto_commit})",
        "New branch": BRANCH,
        "Started": journal.stamp,
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())
