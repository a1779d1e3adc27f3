"""The rebase workflow on a small repository: forwards, interrupted at every step, and back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.commands.rebase import app
from simpletuner_gh200.compat.rebase import checklist, tree, trials, workflow
from simpletuner_gh200.compat.rebase.repository import Repository, write_whole
from simpletuner_gh200.compat.rebase.workflow import Journal, Rebase, StepRecord
from simpletuner_gh200.errors import RunFailed, UsageError
from tests.unit.compat.rebase_samples import make_package, make_repository, write
from tests.unit.upstream.upstream_samples import run_git


@dataclass(frozen=True)
class Finished:
    root: Path
    package: Path
    journal: Journal
    before: dict[str, str]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    make_package(folder / "package")
    make_repository(folder / "checkout")
    return folder


@pytest.fixture(scope="module")
def finished(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One undisturbed rebase, to be looked at by many tests and changed by none."""
    package = sample / "package"
    root = shutil.copytree(sample / "checkout", tmp_path_factory.mktemp("finished") / "checkout")
    before = {name: run_git(root, "rev-parse", name) for name in ("HEAD", "HEAD^{tree}")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tree, "package_folder", lambda: package)
        yield Finished(root, package, begin(root), before)


@pytest.fixture
def repository(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tree, "package_folder", lambda: sample / "package")
    return shutil.copytree(sample / "checkout", tmp_path / "checkout")


def silent(_record: StepRecord) -> None:
    return


def begin(root: Path, onto: str = "v2", *, remote: str | None = None, skip_tests: bool = True) -> Journal:
    return workflow.start(root, onto=onto, remote=remote, skip_tests=skip_tests, tell=silent)


def back(root: Path) -> None:
    assert workflow.rollback(root, yes=True) == 0


def components(root: Path, revisions: str) -> list[str]:
    trailer = "%(trailers:key=GH200-Component,valueonly,separator=)"
    return run_git(root, "log", f"--format={trailer}", revisions).splitlines()[::-1]


# -- forwards -------------------------------------------------------------------------------------------------


def test_the_fresh_branch_is_upstream_plus_one_commit_per_component(finished: Finished) -> None:
    root = finished.root
    assert finished.journal.finished
    assert run_git(root, "branch", "--show-current") == checklist.BRANCH
    assert components(root, "v2..HEAD") == ["package", "entry", "hook", "operator files", "manifest"]
    changed = run_git(root, "diff", "--name-status", "v2", "HEAD").splitlines()
    assert [line for line in changed if not line.startswith("A")] == ["M\tsimpletuner/__init__.py"]
    assert run_git(root, "status", "--porcelain") == ""


def test_every_file_of_the_package_arrives_even_from_rooms_nobody_listed(finished: Finished) -> None:
    vendored = finished.root / "simpletuner/gh200/vendor/simpletuner_gh200"
    arrived = {path.relative_to(vendored) for path in vendored.rglob("*") if path.is_file()}
    package = finished.package
    assert arrived == {p.relative_to(package) for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert Path("brand_new_room/__init__.py") in arrived


def test_an_operator_finds_what_the_guides_name(finished: Finished) -> None:
    tracked = set(run_git(finished.root, "ls-files").splitlines())
    assert tracked >= {
        *("gh200", "train.py", "gh200_diagnostic.py", "validate_uvm.py"),
        *("scripts/setup_gh200_env.sh", "scripts/test_gh200_features.sh"),
        *("config/gh200_in_memory_example.json", "documentation/gh200/compat/migration.md"),
    }
    assert os.access(finished.root / "gh200", os.X_OK)
    text = (finished.root / checklist.CHECKLIST).read_text()
    assert "- [ ] the three feature matrices" in text
    assert "gh200 baseline compare baseline after" in text


def test_the_command_of_a_tree_is_the_package_in_it(finished: Finished, tmp_path: Path) -> None:
    """Called from anywhere; what it starts finds the same."""
    place = tmp_path / "tree"
    package = place / "simpletuner/gh200/vendor/simpletuner_gh200"
    says = "import os, sys\n\ndef main(): print(sys.argv[1:], os.environ['PYTHONPATH'].split(':')[0])\n"
    write(package, {"__init__.py": "", "cli/__init__.py": "", "cli/main.py": says})
    shutil.copy(finished.root / "gh200_diagnostic.py", place)
    command = [sys.executable, str(place / "gh200_diagnostic.py"), "-v"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["['doctor',", "'-v']", str(package.parent)], done.stderr
    (package / "cli/main.py").write_text("import not_installed_here\n")
    lacking = subprocess.run(command, capture_output=True, text=True)
    assert lacking.returncode == 1
    wanted = f"pip install -r {place}/simpletuner/gh200/requirements.txt"
    assert lacking.stderr == f"No module named 'not_installed_here': run `{wanted}`\n"


def test_a_file_that_lies_there_is_kept(repository: Path) -> None:
    """Ignored by git, so that nobody noticed it before."""
    mine = repository / "config" / "gh200_in_memory_example.json"
    write(repository, {"config/gh200_in_memory_example.json": "{}"})
    journal = begin(repository)
    assert mine.read_text() == "{}"
    assert "kept as they were: config/gh200_in_memory_example.json" in journal.step("operator files").result
    back(repository)
    assert mine.read_text() == "{}"


def test_the_hook_is_three_statements_at_the_end(finished: Finished) -> None:
    text = (finished.root / "simpletuner/__init__.py").read_text(encoding="utf-8")
    assert text.startswith("__version__ = '2.0'\n")
    assert text.endswith(tree.HOOK)
    tree.add_hook(finished.root)
    assert (finished.root / "simpletuner/__init__.py").read_text(encoding="utf-8") == text


def test_what_is_left_for_the_way_back(finished: Finished, tmp_path: Path) -> None:
    log = (finished.root / checklist.LOG).read_text(encoding="utf-8")
    assert f"Backup branch: {finished.journal.backup_branch}\n" in log
    assert run_git(finished.root, "rev-parse", finished.journal.backup_branch) == finished.before["HEAD"]
    assert os.access(finished.root / checklist.ROLLBACK, os.X_OK)
    again = tmp_path / "again"
    run_git(tmp_path, "clone", "--quiet", "--branch", "v1", str(finished.root), str(again))
    run_git(again, "apply", "--index", str(finished.root / checklist.PATCH))
    assert run_git(again, "write-tree") == finished.before["HEAD^{tree}"], "the patch is the fork, on its base"


def test_the_manifest_lists_every_component_with_its_size(finished: Finished) -> None:
    text = (finished.root / workflow.MANIFEST).read_text(encoding="utf-8")
    assert "| package | `simpletuner_gh200`, all of it | 13 | 13 | none: new files |" in text
    assert "| hook | end of `simpletuner/__init__.py` | 1 | 5 |" in text


def test_the_checklist_has_a_box_for_every_file_that_the_fork_had_changed(finished: Finished) -> None:
    lines = (finished.root / checklist.CHECKLIST).read_text(encoding="utf-8").splitlines()
    files = ["gone.py", "helpers/plain.py", "helpers/training/trainer.py"]
    boxes = [line for line in lines if line.startswith("- [ ] ") and " " not in line[6:]]
    assert boxes == [*(f"- [ ] simpletuner/{name}" for name in files), "- [ ] tools/mine.sh"]
    assert any("| [x] | vendor package | done |" in line for line in lines)


# -- refusals -------------------------------------------------------------------------------------------------


def test_a_file_in_the_way_is_refused_and_nothing_happens(repository: Path) -> None:
    write(repository, {"simpletuner/new.py": "mine\n"})
    before = run_git(repository, "for-each-ref")
    with pytest.raises(UsageError, match=r"git does not know .*: simpletuner/new\.py"):
        begin(repository)
    assert run_git(repository, "for-each-ref") == before
    assert workflow.load(Repository(repository)) is None
    assert (repository / "simpletuner/new.py").read_text() == "mine\n"


@pytest.mark.parametrize("onto", ["nothing", "--help", "-f"])
def test_a_ref_that_is_none_is_refused_before_anything_happens(repository: Path, onto: str) -> None:
    with pytest.raises(UsageError, match="no commit"):
        begin(repository, onto)
    assert workflow.load(Repository(repository)) is None


def test_other_refusals(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a git checkout"):
        begin(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no remote 'upstream'"):
        begin(repository, remote="upstream")
    run_git(repository, "switch", "--quiet", "--orphan", "other")
    run_git(repository, "commit", "--quiet", "--allow-empty", "--message", "not SimpleTuner")
    run_git(repository, "switch", "--quiet", "fork")
    with pytest.raises(UsageError, match="other is not a SimpleTuner tree"):
        begin(repository, "other")
    (repository / ".git/MERGE_HEAD").write_text(run_git(repository, "rev-parse", "v2"))
    with pytest.raises(UsageError, match="in the middle of something"):
        begin(repository)
    (repository / ".git/MERGE_HEAD").unlink()
    run_git(repository, "branch", checklist.BRANCH)
    with pytest.raises(UsageError, match="already"):
        begin(repository)
    for action in (workflow.status, back):
        with pytest.raises(UsageError, match="no rebase under way"):
            action(repository)  # type: ignore[operator]


def test_a_fetched_ref_can_be_named(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "--quiet", "--branch", "fork", str(repository), str(clone))
    for name in ("user.name", "user.email"):
        run_git(clone, "config", name, "t@example.org")
    run_git(repository, "switch", "--quiet", "--detach", "v2")
    write(repository, {"simpletuner/newest.py": "x = 2\n"})
    run_git(repository, "add", "--all")
    run_git(repository, "commit", "--quiet", "--message", "three")
    run_git(repository, "branch", "release")
    monkeypatch.setattr(Rebase, "steps", lambda self: {"fresh branch": self._fresh_branch})
    assert begin(clone, "origin/release", remote="origin").finished
    assert (clone / "simpletuner/newest.py").exists()


def test_a_journal_of_another_version_is_left_to_it(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "backup", monkeypatch)
    with pytest.raises(UsageError, match="under way"):
        begin(repository)
    monkeypatch.setattr(Rebase, "steps", lambda self: {"backup": self._backup})
    with pytest.raises(UsageError, match="of another version"):
        workflow.go_on(repository, silent)
    journal = Repository(repository).state_folder / workflow.FILE
    journal.write_text(journal.read_text().replace('"stamp"', '"began"'))
    with pytest.raises(UsageError, match="of another version"):
        workflow.status(repository)


def test_a_failed_smoke_test_stops_before_anything_is_brought_in_and_a_repaired_tree_goes_on(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunFailed, match="contract: failed"):
        begin(repository, skip_tests=False)
    assert run_git(repository, "rev-parse", "HEAD") == run_git(repository, "rev-parse", "v2")
    assert workflow.status(repository).step("upstream smoke tests").status == "failed"
    assert "contract: failed" in (repository / checklist.CHECKLIST).read_text(encoding="utf-8")
    for name in ("smoke", "integration"):
        monkeypatch.setattr(trials, name, lambda _root: [trials.TreeTest("contract", "passed", "")])
    assert workflow.go_on(repository, silent).finished


# -- interrupted ----------------------------------------------------------------------------------------------


def interrupted(repository: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a child that is killed when ``step`` has done its work and before that is written down."""
    steps = Rebase.steps

    def killing(self: Rebase) -> dict[str, Callable[[], str]]:
        planned = steps(self)
        run = planned[step]
        return {**planned, step: lambda: (run(), os.kill(os.getpid(), signal.SIGKILL))[0]}  # type: ignore[func-returns-value]

    def advance() -> object:
        known = workflow.load(Repository(repository))
        return begin(repository) if known is None else workflow.go_on(repository, silent)

    with monkeypatch.context() as patched:
        patched.setattr(Rebase, "steps", killing)
        in_killed_child(advance)


def in_killed_child(action: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(3)
    _pid, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child was to be killed"


def test_killed_in_every_step_it_ends_as_if_nothing_had_happened(
    repository: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = finished.root
    for step in finished.journal.steps:
        if "tests" not in step.name:
            interrupted(repository, step.name, monkeypatch)
            assert workflow.status(repository).step(step.name).status == "started"
    assert workflow.go_on(repository, silent).finished
    for what in ("HEAD^{tree}", "fork^{tree}"):
        assert run_git(repository, "rev-parse", what) == run_git(undisturbed, "rev-parse", what)
    assert components(repository, "v2..HEAD") == components(undisturbed, "v2..HEAD")
    assert len(run_git(repository, "branch", "--list", "gh200-backup-*").splitlines()) == 1


@pytest.mark.parametrize("forwards", [True, False])
def test_killed_between_copying_and_committing(
    repository: Path, monkeypatch: pytest.MonkeyPatch, forwards: bool
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Repository, "commit", lambda *_args: os.kill(os.getpid(), signal.SIGKILL))
        in_killed_child(lambda: begin(repository))
    assert "simpletuner/gh200" in run_git(repository, "status", "--porcelain", "--ignored")
    if forwards:
        assert workflow.go_on(repository, silent).finished
        assert run_git(repository, "status", "--porcelain") == ""
    else:
        back(repository)
        assert [path.name for path in (repository / "simpletuner/gh200").iterdir()] == ["uvm.py"]
        left = run_git(repository, "status", "--porcelain", "--ignored").splitlines()
        assert {line[3:] for line in left} == set(checklist.OURS) - {checklist.UNCOMMITTED}


def test_a_torn_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "journal.json", "old")
    monkeypatch.setattr(os, "replace", lambda *_args: os.kill(os.getpid(), signal.SIGKILL))
    in_killed_child(lambda: write_whole(tmp_path / "journal.json", "torn"))
    assert (tmp_path / "journal.json").read_text() == "old"


def test_edits_made_in_between_are_kept_as_a_patch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    write(repository, {"simpletuner/helpers/plain.py": "def plain():\n    return 'edited'\n"})
    workflow.go_on(repository, silent)
    (patch,) = Repository(repository).state_folder.glob("uncommitted-*.patch")
    assert "+    return 'edited'" in patch.read_text(encoding="utf-8")


def test_a_clean_tree_has_no_patch_of_what_was_not_committed(repository: Path) -> None:
    (repository / checklist.UNCOMMITTED).write_text("of an earlier rebase")
    journal = begin(repository)
    told = journal.step("safety files").result.split(", ")
    assert set(told) == set(checklist.OURS) - {checklist.UNCOMMITTED}
    assert all((repository / name).exists() for name in told)
    assert not (repository / checklist.UNCOMMITTED).exists()


EDITED = "def plain():\n    return 'not committed'\n"


def test_uncommitted_changes_are_kept_and_come_back(repository: Path) -> None:
    write(repository, {"simpletuner/helpers/plain.py": EDITED, "notes.txt": "mine\n"})
    begin(repository)
    assert (repository / "notes.txt").read_text() == "mine\n", "a file that is in nobody's way stays"
    assert "simpletuner/helpers/plain.py. The changes are in" in (repository / checklist.CHECKLIST).read_text()
    assert "+    return 'not committed'" in (repository / checklist.UNCOMMITTED).read_text()
    assert (repository / "simpletuner/helpers/plain.py").read_text() != EDITED
    back(repository)
    assert (repository / "simpletuner/helpers/plain.py").read_text() == EDITED


def test_uncommitted_changes_survive_a_kill(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(repository, {"simpletuner/helpers/plain.py": EDITED})
    interrupted(repository, "vendor package", monkeypatch)
    workflow.go_on(repository, silent)
    script = repository / checklist.ROLLBACK
    assert subprocess.run([script], input="n\n", capture_output=True, text=True).returncode == 1
    assert run_git(repository, "branch", "--show-current") == checklist.BRANCH
    back(repository)
    assert run_git(repository, "branch", "--show-current") == "fork"
    assert (repository / "simpletuner/helpers/plain.py").read_text() == EDITED


# -- back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["backup", "fresh branch", "vendor package"])
def test_rollback_after_any_step(repository: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    original = run_git(repository, "rev-parse", "HEAD")
    interrupted(repository, step, monkeypatch)
    back(repository)
    assert run_git(repository, "rev-parse", "HEAD") == original
    assert run_git(repository, "branch", "--show-current") == "fork"
    assert run_git(repository, "status", "--porcelain") == ""
    assert not Repository(repository).has_branch(checklist.BRANCH)
    interrupted(repository, step, monkeypatch)
    assert workflow.status(repository).step(step).status == "started", "one can start again"


def test_rollback_never_resets_a_branch_that_moved(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    journal = workflow.status(repository)
    run_git(repository, "branch", "-f", "fork", "v2")
    back(repository)
    assert f"the state of then is in {journal.backup_branch}" in capfd.readouterr().err
    assert run_git(repository, "rev-parse", "fork") == run_git(repository, "rev-parse", "v2")


def test_the_commands_answer_in_one_line_of_json(repository: Path) -> None:
    place = ["--repo", str(repository)]
    for command in (["start", "--onto", "v2", "--skip-tests"], ["status"]):
        done = CliRunner().invoke(app, [*command, *place, "--json"])
        assert done.exit_code == 0, done.output
        (line,) = done.stdout.splitlines()
        told = json.loads(line)
        assert told["finished"] is True and told["onto_ref"] == "v2"
        assert {step["status"] for step in told["steps"]} <= {"done", "skipped"}
    done = CliRunner().invoke(app, ["rollback", *place, "--yes"])
    assert done.exit_code == 0, done.output
    assert run_git(repository, "branch", "--show-current") == "fork"
