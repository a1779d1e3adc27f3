"""The steps in order. Each may be run again after an interruption and then does only what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.operate.rebase import artifacts, fork_report, operators, trials, vendor
from simpletuner_gh200.operate.rebase.components import Component, all_components
from simpletuner_gh200.operate.rebase.journal import Journal, write_whole
from simpletuner_gh200.operate.rebase.repository import Repository
from simpletuner_gh200.units import counted

MATRICES = "feature matrix tests"
MANIFEST = "docs/GH200_PATCH_MANIFEST.md"


class StepSkipped(Exception):
    """The step was not wanted; the text says why."""


@dataclass(frozen=True)
class Step:
    """``run`` returns the result for the checklist, or raises."""

    name: str
    run: Callable[[Repository, Journal], str]


def all_steps() -> tuple[Step, ...]:
    return (
        Step("backup", backup),
        Step("safety files", safety_files),
        Step("fork report", report_fork),
        Step("fresh branch", fresh_branch),
        Step("upstream smoke tests", smoke_tests),
        *(Step(f"vendor {component.name}", _vendoring(component)) for component in all_components()),
        Step("entry", entry),
        Step("hook", hook),
        Step("operator files", operator_files),
        Step("manifest", write_manifest),
        Step("integration tests", integration_tests),
        Step(MATRICES, feature_matrices),
    )


def backup(repository: Repository, journal: Journal) -> str:
    repository.create_branch(journal.backup_branch, journal.original_commit)
    return journal.backup_branch


def safety_files(repository: Repository, journal: Journal) -> str:
    repository.ignore_ours(artifacts.OURS)
    artifacts.write_safety(repository, journal)
    return ", ".join(artifacts.OURS)


def report_fork(repository: Repository, journal: Journal) -> str:
    report = fork_report.examine(repository, journal.original_commit, journal.onto_commit)
    journal.fork = report.to_json()
    return f"{len(report.edits)} upstream files edited, {report.by_hand} of them with something to look at by hand"


def fresh_branch(repository: Repository, journal: Journal) -> str:
    repository.create_branch(artifacts.BRANCH, journal.onto_commit)
    repository.switch(artifacts.BRANCH)
    return f"{artifacts.BRANCH} at {repository.head()[:12]}"


def smoke_tests(repository: Repository, journal: Journal) -> str:
    if journal.skip_tests:
        raise StepSkipped("--skip-tests")
    return _judge(trials.smoke(repository.root))


def _vendoring(component: Component) -> Callable[[Repository, Journal], str]:
    def run(repository: Repository, journal: Journal) -> str:
        _on_branch(repository)
        paths = vendor.copy_component(repository.root, component)
        return _commit(
            repository, component.name, f"Vendor simpletuner-gh200: {component.name}\n\n{component.purpose}", paths
        )

    return run


def entry(repository: Repository, journal: Journal) -> str:
    _on_branch(repository)
    paths = vendor.write_entry(repository.root)
    return _commit(repository, "entry", "Add simpletuner.gh200, the way in to the vendored package", paths)


def hook(repository: Repository, journal: Journal) -> str:
    _on_branch(repository)
    return _commit(repository, "hook", "Activate simpletuner.gh200 with SimpleTuner", vendor.add_hook(repository.root))


def operator_files(repository: Repository, journal: Journal) -> str:
    _on_branch(repository)
    ours, kept = operators.copy(repository.root)
    done = _commit(repository, "operator files", "Scripts, configurations, pages and the gh200 command", ours)
    return done + (f"; kept as they were: {', '.join(kept)}" if kept else "")


def write_manifest(repository: Repository, journal: Journal) -> str:
    _on_branch(repository)
    path = repository.root / MANIFEST
    path.parent.mkdir(exist_ok=True)
    write_whole(path, vendor.manifest(repository.root, journal.onto_ref))
    return _commit(repository, "manifest", "List what was brought in for GH200, with size and risk", [MANIFEST])


def integration_tests(repository: Repository, journal: Journal) -> str:
    if journal.skip_tests:
        raise StepSkipped("--skip-tests")
    return _judge(trials.integration(repository.root))


def feature_matrices(repository: Repository, journal: Journal) -> str:
    """Real runs, which take minutes and SimpleTuner's own packages: started by a person, recorded all the same."""
    raise StepSkipped("`gh200 rebase test --runs` runs them")


def _commit(repository: Repository, component: str, message: str, paths: list[str]) -> str:
    made = repository.commit(f"{message}\n\nGH200-Component: {component}\n", paths)
    return f"{counted(len(paths), 'file')}, " + (f"commit {made[:12]}" if made else "committed before")


def _judge(found: list[trials.Trial]) -> str:
    text = "\n".join(map(str, found))
    if any(trial.outcome == "failed" for trial in found):
        raise RunFailed(text, remedy="repair the tree and run `gh200 rebase continue`, or `gh200 rebase rollback`")
    return text


def _on_branch(repository: Repository) -> None:
    if repository.branch() != artifacts.BRANCH:
        raise RunFailed(f"{repository.root} is on {repository.branch()}, not on {artifacts.BRANCH}",
                        remedy=f"git switch {artifacts.BRANCH}, then `gh200 rebase continue`")  # fmt: skip
