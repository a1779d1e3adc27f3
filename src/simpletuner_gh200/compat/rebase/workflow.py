"""Start, go on, look, go back: the steps in order, and the journal over them.

Each step may be run again after an interruption and then does only what is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from simpletuner_gh200.compat.rebase import checklist, tree, trials
from simpletuner_gh200.compat.rebase.checklist import BRANCH
from simpletuner_gh200.compat.rebase.repository import Repository, write_whole
from simpletuner_gh200.errors import GH200Error, RunFailed, UsageError
from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream.source import resolve

FILE = "journal.json"
SMOKE, INTEGRATION = "upstream smoke tests", "integration tests"
MANIFEST = "docs/GH200_PATCH_MANIFEST.md"


@dataclass
class StepRecord:
    """``status``: pending, started, done, failed, skipped. A step found started was interrupted."""

    name: str
    status: str = "pending"
    result: str = ""
    at: str = ""


@dataclass
class Journal:
    """Everything a later process needs to go on, to report, or to go back."""

    stamp: str
    original_branch: str | None
    """None where HEAD was detached."""
    original_commit: str
    onto_ref: str
    onto_commit: str
    remote: str | None
    skip_tests: bool
    steps: list[StepRecord]
    base_commit: str
    """That the fork grew from; upstream's new one where the two have none in common."""
    changed: list[str]
    """The fork's own files, and those of upstream's that it had edited or deleted."""
    uncommitted: list[str]
    """Files with changes that were not committed when it started; the changes are in a patch."""

    @property
    def backup_branch(self) -> str:
        return f"gh200-backup-{self.stamp}"

    def next_step(self) -> StepRecord | None:
        return next((step for step in self.steps if step.status not in ("done", "skipped")), None)

    @property
    def finished(self) -> bool:
        return self.next_step() is None

    def step(self, name: str) -> StepRecord:
        return next(step for step in self.steps if step.name == name)


Tell = Callable[[StepRecord], None]


class StepSkipped(Exception):
    """The step was not wanted; the text says why."""


class Rebase:
    """One rebase in one checkout. Its journal is a file inside the git folder, written whole around every step."""

    def __init__(self, repository: Repository, journal: Journal) -> None:
        self.repository, self.journal = repository, journal
        self.root = repository.root

    @classmethod
    def under_way(cls, folder: Path) -> Rebase:
        repository = Repository(folder)
        journal = load(repository)
        if journal is None:
            remedy = "gh200 rebase start --repo DIR --onto REF"
            raise UsageError(f"no rebase under way in {repository.root}", remedy=remedy)
        return cls(repository, journal)

    def advance(self, tell: Tell) -> Journal:
        steps = self.steps()
        if any(record.name not in steps for record in self.journal.steps):
            raise of_another_version(self.repository)
        while (record := self.journal.next_step()) is not None:
            self.record(record, "started", "")
            try:
                self.record(record, "done", steps[record.name]())
            except StepSkipped as reason:
                self.record(record, "skipped", str(reason))
            except GH200Error as failure:
                self.record(record, "failed", failure.message)
                raise
            finally:
                tell(record)
        return self.journal

    def record(self, step: StepRecord, status: str, result: str) -> None:
        step.status, step.result, step.at = status, result, clock()
        self.save()
        checklist.record(self.repository, self.journal, f"{step.at} {step.name}: {status} {result}")

    def save(self) -> None:
        write_whole(self.repository.state_folder / FILE, json.dumps(asdict(self.journal), indent=1))

    def archive(self) -> None:
        """Out of the way of the next rebase, but kept."""
        folder = self.repository.state_folder
        os.replace(folder / FILE, folder / f"journal-{self.journal.stamp}.json")

    # -- the steps -------------------------------------------------------------------------------------

    def steps(self) -> dict[str, Callable[[], str]]:
        """In order. What each returns is its result in the checklist."""
        return {
            "backup": self._backup,
            "safety files": self._safety_files,
            "fresh branch": self._fresh_branch,
            SMOKE: partial(self._tests, trials.smoke),
            **{component.step: partial(self._bring_in, component) for component in tree.all_components()},
            "manifest": self._manifest,
            INTEGRATION: partial(self._tests, trials.integration),
        }

    def _backup(self) -> str:
        self.repository.create_branch(self.journal.backup_branch, self.journal.original_commit)
        return self.journal.backup_branch

    def _safety_files(self) -> str:
        self.repository.ignore(checklist.OURS)
        return ", ".join(checklist.write_safety(self.repository, self.journal))

    def _fresh_branch(self) -> str:
        self.repository.create_branch(BRANCH, self.journal.onto_commit)
        self.repository.switch(BRANCH)
        return f"{BRANCH} at {self.repository.head()[:12]}"

    def _tests(self, run: Callable[[Path], list[trials.TreeTest]]) -> str:
        if self.journal.skip_tests:
            raise StepSkipped("--skip-tests")
        found = run(self.root)
        text = "\n".join(map(str, found))
        if any(trial.outcome == "failed" for trial in found):
            raise RunFailed(text, remedy="repair the tree and run `gh200 rebase continue`, or `gh200 rebase rollback`")
        return text

    def _bring_in(self, component: tree.Component) -> str:
        self._require_branch()
        kept = tree.kept_files(self.root) if component.name == "operator files" else []
        done = self._commit(component.name, component.purpose, component.write(self.root))
        return done + (f"; kept as they were: {', '.join(kept)}" if kept else "")

    def _manifest(self) -> str:
        self._require_branch()
        rows = [(component.name, component.purpose, component.risk) for component in tree.all_components()]
        write_whole(self.root / MANIFEST, checklist.manifest(self.repository, self.journal, rows))
        return self._commit("manifest", "What was brought in for GH200, with size and risk", [MANIFEST])

    def _commit(self, component: str, purpose: str, paths: list[str]) -> str:
        message = f"Bring in simpletuner-gh200: {component}\n\n{purpose}\n\nGH200-Component: {component}\n"
        made = self.repository.commit(message, paths)
        return f"{counted(len(paths), 'file')}, " + (f"commit {made[:12]}" if made else "committed before")

    def _require_branch(self) -> None:
        if self.repository.branch() != BRANCH:
            raise RunFailed(f"{self.root} is on {self.repository.branch()}, not on {BRANCH}",
                            remedy=f"git switch {BRANCH}, then `gh200 rebase continue`")  # fmt: skip


def start(folder: Path, *, onto: str, remote: str | None, skip_tests: bool, tell: Tell) -> Journal:
    """Check everything that can be checked first; then write the journal; then act."""
    repository = Repository(folder)
    earlier = load(repository)
    if earlier is not None and not earlier.finished:
        raise UsageError("a rebase is under way here", remedy="`gh200 rebase continue`, or `gh200 rebase rollback`")
    if repository.has_branch(BRANCH):
        remedy = "rename it (git branch -m) or delete it (git branch -D)"
        raise UsageError(f"there is a branch {BRANCH} already", remedy=remedy)
    if remote is not None and remote not in repository.git("remote").splitlines():
        raise UsageError(f"no remote {remote!r}", remedy="git remote add it, or name another with --remote")
    repository.ignore(checklist.OURS)
    repository.require_ready()
    if remote is not None:
        repository.git("fetch", "--tags", "--", remote)
    onto_commit = resolve(repository.root, onto)
    if not repository.text(onto_commit, tree.HOOKED):
        raise UsageError(
            f"{onto} is not a SimpleTuner tree: it has no {tree.HOOKED}", remedy="name a ref of SimpleTuner's"
        )
    repository.require_room(onto_commit, (tree.HOME, MANIFEST, tree.PAGES))
    if earlier is not None:
        Rebase(repository, earlier).archive()
    head = repository.head()
    base = repository.ancestor(head, onto_commit) or onto_commit
    journal = Journal(
        stamp=datetime.now(UTC).strftime("%Y%m%d_%H%M%S"),
        original_branch=repository.branch(),
        original_commit=head,
        onto_ref=onto,
        onto_commit=onto_commit,
        remote=remote,
        skip_tests=skip_tests,
        steps=[],
        base_commit=base,
        changed=repository.names("diff", "--name-only", "--no-renames", "-z", base, head),
        uncommitted=repository.uncommitted(),
    )
    rebase = Rebase(repository, journal)
    journal.steps += map(StepRecord, rebase.steps())
    rebase.save()
    return rebase.advance(tell)


def go_on(folder: Path, tell: Tell) -> Journal:
    return Rebase.under_way(folder).advance(tell)


def status(folder: Path) -> Journal:
    return Rebase.under_way(folder).journal


def rollback(folder: Path, *, yes: bool) -> int:
    """Back to the branch it started from, by the script that does it without us; its exit code."""
    rebase = Rebase.under_way(folder)
    script = rebase.root / checklist.ROLLBACK
    if not script.exists():
        rebase.archive()  # it was interrupted before anything was changed
        return 0
    return subprocess.run([script, *(["--yes"] if yes else [])], check=False).returncode


def load(repository: Repository) -> Journal | None:
    """The journal of the rebase under way, or None."""
    try:
        data = json.loads((repository.state_folder / FILE).read_text(encoding="utf-8"))
        return Journal(**{**data, "steps": [StepRecord(**step) for step in data["steps"]]})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as unknown:
        raise of_another_version(repository) from unknown


def of_another_version(repository: Repository) -> UsageError:
    return UsageError(
        f"{repository.state_folder / FILE} is damaged, or of another version of this command",
        remedy="finish with that version, or go back with ROLLBACK.sh and delete it",
    )


def clock() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
