"""Start, go on, look, test, go back: the state machine over the journal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from simpletuner_gh200.errors import GH200Error, UsageError
from simpletuner_gh200.operate.rebase import artifacts, operators, trials, vendor
from simpletuner_gh200.operate.rebase import journal as journals
from simpletuner_gh200.operate.rebase.components import HOME
from simpletuner_gh200.operate.rebase.journal import Journal, StepRecord
from simpletuner_gh200.operate.rebase.repository import Repository
from simpletuner_gh200.operate.rebase.steps import MANIFEST, MATRICES, StepSkipped, all_steps
from simpletuner_gh200.upstream.git import resolve

Tell = Callable[[StepRecord], None]


def start(folder: Path, *, onto: str, remote: str | None, skip_tests: bool, tell: Tell) -> Journal:
    """Check everything that can be checked first; then write the journal; then act."""
    repository = Repository(folder)
    under_way = journals.load(repository.state_folder)
    if under_way is not None and not under_way.finished:
        raise UsageError("a rebase is under way here", remedy="`gh200 rebase continue`, or `gh200 rebase rollback`")
    if repository.has_branch(artifacts.BRANCH):
        raise UsageError(
            f"there is a branch {artifacts.BRANCH} already",
            remedy="rename it (git branch -m) or delete it (git branch -D)",
        )
    if remote is not None and not repository.has_remote(remote):
        raise UsageError(f"no remote {remote!r}", remedy="git remote add it, or name another with --remote")
    repository.ignore_ours(artifacts.OURS)
    repository.require_ready()
    if remote is not None:
        repository.fetch(remote)
    onto_commit = resolve(repository.root, onto)
    if not repository.has_file(onto_commit, vendor.HOOKED):
        raise UsageError(
            f"{onto} is not a SimpleTuner tree: it has no {vendor.HOOKED}", remedy="name a ref of SimpleTuner's"
        )
    repository.require_room(onto_commit, (HOME, MANIFEST, operators.PAGES))
    if under_way is not None:
        journals.archive(repository.state_folder, under_way)
    journal = Journal(
        stamp=_now().strftime("%Y%m%d_%H%M%S"),
        original_branch=repository.branch(),
        original_commit=repository.head(),
        onto_ref=onto,
        onto_commit=onto_commit,
        remote=remote,
        skip_tests=skip_tests,
        steps=[StepRecord(step.name) for step in all_steps()],
        uncommitted=repository.uncommitted(),
    )
    journals.save(repository.state_folder, journal)
    return _advance(repository, journal, tell)


def go_on(folder: Path, tell: Tell) -> Journal:
    repository = Repository(folder)
    return _advance(repository, require_journal(repository), tell)


def status(folder: Path) -> Journal:
    return require_journal(Repository(folder))


def run_tests(folder: Path, *, runs: bool = False) -> list[trials.Trial]:
    """The integration tests again, or real ``runs``, on the tree as it is now; recorded if the rebase got so far."""
    repository = Repository(folder)
    journal = require_journal(repository)
    found = trials.matrices(repository.root) if runs else trials.integration(repository.root)
    record = journal.step(MATRICES if runs else "integration tests")
    if journal.step("manifest").status == "done":
        failed = any(trial.outcome == "failed" for trial in found)
        _record(repository, journal, record, "failed" if failed else "done", "\n".join(map(str, found)))
    return found


def rollback(folder: Path) -> str:
    """Back to the branch it started from. Nothing is deleted: the new branch keeps its commits under another name."""
    repository = Repository(folder)
    journal = require_journal(repository)
    if repository.branch() == artifacts.BRANCH:
        # Copied but not yet committed when it was interrupted.
        repository.drop_untracked((HOME, MANIFEST))
        operators.remove_copies(repository.root, repository.tracked())
    repository.switch_to(journal.original_branch, journal.original_commit)
    if repository.has_branch(artifacts.BRANCH):
        repository.git("branch", "-M", artifacts.BRANCH, f"gh200-rolled-back-{journal.stamp}")
    artifacts.append_log(repository.root, f"{_clock()} rolled back")
    journals.archive(repository.state_folder, journal)
    where = journal.original_branch or journal.original_commit[:12]
    if repository.head() != journal.original_commit:
        return f"on {where}, which has moved since; the state of then is in {journal.backup_branch}"
    patch = repository.root / artifacts.UNCOMMITTED
    if journal.uncommitted and not (patch.exists() and repository.apply(patch)):
        return f"on {where}; what was not committed then is in {patch.name}, which does not apply by itself"
    return f"on {where}, as it was; the backup branch {journal.backup_branch} is kept"


def require_journal(repository: Repository) -> Journal:
    journal = journals.load(repository.state_folder)
    if journal is None:
        raise UsageError(f"no rebase under way in {repository.root}", remedy="gh200 rebase start --repo DIR --onto REF")
    return journal


def _advance(repository: Repository, journal: Journal, tell: Tell) -> Journal:
    runs = {step.name: step.run for step in all_steps()}
    if any(record.name not in runs for record in journal.steps):
        raise journals.of_another_version(repository.state_folder)
    while (record := journal.next_step()) is not None:
        _record(repository, journal, record, "started", "")
        try:
            result, outcome = runs[record.name](repository, journal), "done"
        except StepSkipped as reason:
            result, outcome = str(reason), "skipped"
        except GH200Error as failure:
            _record(repository, journal, record, "failed", failure.message)
            tell(record)
            raise
        _record(repository, journal, record, outcome, result)
        tell(record)
    return journal


def _record(repository: Repository, journal: Journal, record: StepRecord, status: str, result: str) -> None:
    record.status, record.result, record.at = status, result, _clock()
    journals.save(repository.state_folder, journal)
    if (repository.root / artifacts.LOG).exists():
        artifacts.append_log(
            repository.root, f"{record.at} {record.name}: {status} {result}".replace("\n", "; ").rstrip()
        )
        artifacts.write_checklist(repository.root, journal)


def _now() -> datetime:
    return datetime.now(UTC)


def _clock() -> str:
    return _now().strftime("%Y-%m-%d %H:%M:%SZ")
