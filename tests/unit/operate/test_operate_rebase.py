"""The rebase workflow on a small repository: forwards, interrupted at every step, and back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.commands.rebase import app
from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate.rebase import artifacts, components, steps, trials, vendor, workflow
from simpletuner_gh200.operate.rebase import journal as journals
from simpletuner_gh200.operate.rebase.journal import Journal, StepRecord
from simpletuner_gh200.operate.rebase.repository import Repository
from tests.unit.operate.rebase_samples import make_package, make_repository, run_git, write


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
        for module in (components, vendor):
            patched.setattr(module, "package_folder", lambda: package)
        yield Finished(root, package, begin(root), before)


@dataclass(frozen=True)
class Finished:
    root: Path
    package: Path
    journal: Journal
    before: dict[str, str]


@pytest.fixture
def repository(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (components, vendor):
        monkeypatch.setattr(module, "package_folder", lambda: sample / "package")
    return shutil.copytree(sample / "checkout", tmp_path / "checkout")


def silent(_record: StepRecord) -> None:
    return


def begin(root: Path, onto: str = "v2", **options: object) -> Journal:
    settings = {"remote": None, "skip_tests": True, "tell": silent, **options}
    return workflow.start(root, onto=onto, **settings)  # type: ignore[arg-type]


def subjects(root: Path, revisions: str) -> list[str]:
    return run_git(
        root, "log", "--format=%(trailers:key=GH200-Component,valueonly,separator=)", revisions
    ).splitlines()[::-1]


# -- forwards -------------------------------------------------------------------------------------------------


def test_the_fresh_branch_is_upstream_plus_one_commit_per_component(finished: Finished) -> None:
    root = finished.root
    assert finished.journal.finished
    assert run_git(root, "branch", "--show-current") == artifacts.BRANCH
    names = [component.name for component in components.all_components()]
    assert subjects(root, "v2..HEAD") == [*names, "entry", "hook", "operator files", "manifest"]
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
    wanted = {
        "gh200",
        "train.py",
        "gh200_diagnostic.py",
        "scripts/setup_gh200_env.sh",
        "scripts/test_gh200_features.sh",
    }
    wanted |= {"config/gh200_in_memory_example.json", "documentation/gh200/operating/migration.md", "validate_uvm.py"}
    assert wanted <= tracked
    assert os.access(finished.root / "gh200", os.X_OK)
    checklist = (finished.root / artifacts.CHECKLIST).read_text()
    assert "| [ ] | feature matrix tests | skipped |" in checklist
    assert "gh200 baseline compare baseline after" in checklist


def test_the_command_of_a_tree_is_the_package_in_it(finished: Finished, tmp_path: Path) -> None:
    """Called from anywhere; what it starts finds the same."""
    tree = tmp_path / "tree"
    package = tree / "simpletuner/gh200/vendor/simpletuner_gh200"
    (package / "cli").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli/__init__.py").touch()
    says = "import os, sys\n\ndef main(): print(sys.argv[1:], os.environ['PYTHONPATH'].split(':')[0])\n"
    (package / "cli/main.py").write_text(says)
    shutil.copy(finished.root / "gh200_diagnostic.py", tree)
    done = subprocess.run([sys.executable, str(tree / "gh200_diagnostic.py"), "-v"], capture_output=True, text=True)
    assert done.stdout.split() == ["['doctor',", "'-v']", str(package.parent)], done.stderr
    (package / "cli/main.py").write_text("import not_installed_here\n")
    lacking = subprocess.run([sys.executable, str(tree / "gh200_diagnostic.py")], capture_output=True, text=True)
    assert lacking.returncode == 1
    wanted = f"pip install -r {tree}/simpletuner/gh200/requirements.txt"
    assert lacking.stderr == f"No module named 'not_installed_here': run `{wanted}`\n"


def test_a_file_that_lies_there_is_kept(repository: Path) -> None:
    """Ignored by git, so that nobody noticed it before."""
    mine = repository / "config" / "gh200_in_memory_example.json"
    mine.parent.mkdir()
    mine.write_text("{}")
    journal = begin(repository)
    assert mine.read_text() == "{}"
    assert "kept as they were: config/gh200_in_memory_example.json" in journal.step("operator files").result
    workflow.rollback(repository)
    assert mine.read_text() == "{}"


def test_the_matrices_are_run_on_the_tree_and_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(repository)
    row = {"test": "U1", "scenario": "s", "outcome": "failed", "detail": "why"}
    said = f"echo '{json.dumps({'rows': [row], 'passed': 2})}'; exit 1"
    for suite in ("gh200", "combined"):
        (repository / f"scripts/test_{suite}_features.sh").write_text("""echo '{"rows": [], "passed": 3}'""")
    (repository / "scripts/test_upstream_features.sh").write_text(said)
    found = workflow.run_tests(repository, runs=True)
    assert [trial.outcome for trial in found] == ["failed", "passed", "passed"]
    record = workflow.status(repository).step("feature matrix tests")
    assert record.status == "failed"
    assert "2 passed, 1 failed, 0 skipped; U1 s: why" in record.result


def test_the_hook_is_three_statements_at_the_end(finished: Finished) -> None:
    text = (finished.root / "simpletuner/__init__.py").read_text(encoding="utf-8")
    assert text.startswith("__version__ = '2.0'\n")
    assert text.endswith(vendor.HOOK)
    vendor.add_hook(finished.root)
    assert (finished.root / "simpletuner/__init__.py").read_text(encoding="utf-8") == text


def test_what_is_left_for_the_way_back(finished: Finished) -> None:
    log = (finished.root / artifacts.LOG).read_text(encoding="utf-8")
    assert f"Backup branch: {finished.journal.backup_branch}\n" in log
    assert run_git(finished.root, "rev-parse", finished.journal.backup_branch) == finished.before["HEAD"]
    patch = (finished.root / artifacts.PATCH).read_text(encoding="utf-8")
    assert "+echo mine" in patch
    assert "-    def register_manual_validation_trigger(self, consumer):" in patch
    assert os.access(finished.root / artifacts.ROLLBACK, os.X_OK)


def test_the_patch_brings_the_fork_back_onto_its_base(finished: Finished, tmp_path: Path) -> None:
    again = tmp_path / "again"
    run_git(tmp_path, "clone", "--quiet", "--branch", "v1", str(finished.root), str(again))
    run_git(again, "apply", "--index", str(finished.root / artifacts.PATCH))
    assert run_git(again, "write-tree") == finished.before["HEAD^{tree}"]


def test_the_manifest_lists_every_component_with_its_size(finished: Finished) -> None:
    text = (finished.root / steps.MANIFEST).read_text(encoding="utf-8")
    assert "| cache | The purpose of cache. | 1 | 1 | none: new files |" in text
    assert "| hook | end of `simpletuner/__init__.py` | 1 | 3 |" in text


def test_the_checklist_says_what_the_fork_had_done(finished: Finished) -> None:
    text = (finished.root / artifacts.CHECKLIST).read_text(encoding="utf-8")
    trainer = next(line for line in text.splitlines() if "training/trainer.py" in line)
    assert "1 of 3 hunks: trainer.train" in trainer
    assert "Trainer.register_manual_validation_trigger (whole)" in trainer
    assert "lines in Trainer.train" in trainer
    plain = next(line for line in text.splitlines() if "helpers/plain.py" in line)
    assert "0 of 1 hunks" in plain
    assert "lines in plain" in plain
    by_hand = [line for line in text.splitlines() if line.startswith("- [ ] simpletuner/")]
    assert [line.partition(":")[0] for line in by_hand] == [
        "- [ ] simpletuner/helpers/plain.py",
        "- [ ] simpletuner/helpers/training/trainer.py",
        "- [ ] simpletuner/helpers/training/trainer.py",
    ]
    assert any("self.my_own_counter += 1" in line for line in by_hand), "someone's own work in a file full of seams"
    assert "- [ ] tools/mine.sh" in text
    assert "1 under simpletuner/gh200, replaced" in text
    assert "| [x] | vendor cache | done |" in text


# -- refusals -------------------------------------------------------------------------------------------------


def test_a_file_in_the_way_is_refused_and_nothing_happens(repository: Path) -> None:
    write(repository, {"simpletuner/new.py": "mine\n"})
    before = run_git(repository, "for-each-ref")
    with pytest.raises(UsageError, match=r"git does not know .*: simpletuner/new\.py"):
        begin(repository)
    assert run_git(repository, "for-each-ref") == before
    assert journals.load(Repository(repository).state_folder) is None
    assert (repository / "simpletuner/new.py").read_text() == "mine\n"


@pytest.mark.parametrize("onto", ["nothing", "--help", "-f"])
def test_a_ref_that_is_none_is_refused_before_anything_happens(repository: Path, onto: str) -> None:
    with pytest.raises(UsageError, match="no commit"):
        begin(repository, onto)
    assert journals.load(Repository(repository).state_folder) is None


def test_a_second_start_is_refused_while_one_is_under_way(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "backup", monkeypatch)
    with pytest.raises(UsageError, match="under way"):
        begin(repository)


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
    run_git(repository, "branch", artifacts.BRANCH)
    with pytest.raises(UsageError, match="already"):
        begin(repository)


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
    monkeypatch.setattr(workflow, "all_steps", lambda: [s for s in steps.all_steps() if s.name == "fresh branch"])
    assert begin(clone, "origin/release", remote="origin").finished
    assert (clone / "simpletuner/newest.py").exists()


def test_a_journal_of_another_version_is_left_to_it(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "backup", monkeypatch)
    monkeypatch.setattr(workflow, "all_steps", lambda: steps.all_steps()[:-2])
    with pytest.raises(UsageError, match="of another version"):
        workflow.go_on(repository, silent)


# -- tests of the tree ----------------------------------------------------------------------------------------


def test_a_failed_smoke_test_stops_before_anything_is_brought_in(repository: Path) -> None:
    with pytest.raises(RunFailed, match="contract: failed"):
        begin(repository, skip_tests=False)
    assert run_git(repository, "rev-parse", "HEAD") == run_git(repository, "rev-parse", "v2")
    assert workflow.status(repository).step("upstream smoke tests").status == "failed"
    assert "contract: failed" in (repository / artifacts.CHECKLIST).read_text(encoding="utf-8")


def test_a_repaired_tree_goes_on(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed):
        begin(repository, skip_tests=False)
    good = [trials.Trial("contract", "passed", "")]
    monkeypatch.setattr(trials, "smoke", lambda _root: good)
    monkeypatch.setattr(trials, "integration", lambda _root: good)
    assert workflow.go_on(repository, silent).finished


# -- interrupted ----------------------------------------------------------------------------------------------


def interrupted(repository: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a child that is killed when ``step`` has done its work and before that is written down."""
    inside = {"name": step}

    def killing(original: steps.Step) -> steps.Step:
        def run(where: Repository, journal: Journal) -> str:
            result = original.run(where, journal)
            if original.name == inside["name"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return replace(original, run=run)

    with monkeypatch.context() as patched:
        planned = tuple(killing(original) for original in steps.all_steps())
        patched.setattr(workflow, "all_steps", lambda: planned)
        in_killed_child(lambda: advance(repository))


def advance(repository: Path) -> None:
    if journals.load(Repository(repository).state_folder) is None:
        begin(repository)
    else:
        workflow.go_on(repository, silent)


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
    for step in steps.all_steps():
        if "tests" not in step.name:
            interrupted(repository, step.name, monkeypatch)
            assert workflow.status(repository).step(step.name).status == "started"
    assert workflow.go_on(repository, silent).finished
    for what in ("HEAD^{tree}", "fork^{tree}"):
        assert run_git(repository, "rev-parse", what) == run_git(undisturbed, "rev-parse", what)
    assert subjects(repository, "v2..HEAD") == subjects(undisturbed, "v2..HEAD")
    assert len(run_git(repository, "branch", "--list", "gh200-backup-*").splitlines()) == 1


def killed_before_the_first_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(Repository, "commit", killed)
        in_killed_child(lambda: begin(repository))
    assert "simpletuner/gh200" in run_git(repository, "status", "--porcelain", "--ignored")


def test_killed_between_copying_and_committing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_the_first_commit(repository, monkeypatch)
    assert workflow.go_on(repository, silent).finished
    assert run_git(repository, "status", "--porcelain") == ""


def test_a_torn_journal_is_never_seen(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, folder = finished.journal, tmp_path / "state"
    journals.save(folder, journal)
    monkeypatch.setattr(os, "replace", lambda *_args: os.kill(os.getpid(), signal.SIGKILL))
    in_killed_child(lambda: journals.save(folder, replace(journal, onto_ref="torn")))
    kept = journals.load(folder)
    assert kept is not None
    assert kept.onto_ref == "v2"


def test_edits_made_in_between_are_kept_as_a_patch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    write(repository, {"simpletuner/helpers/plain.py": "def plain():\n    return 'edited'\n"})
    workflow.go_on(repository, silent)
    (patch,) = Repository(repository).state_folder.glob("uncommitted-*.patch")
    assert "+    return 'edited'" in patch.read_text(encoding="utf-8")


EDITED = "def plain():\n    return 'not committed'\n"


def test_uncommitted_changes_are_kept_and_come_back(repository: Path) -> None:
    write(repository, {"simpletuner/helpers/plain.py": EDITED, "notes.txt": "mine\n"})
    begin(repository)
    assert (repository / "notes.txt").read_text() == "mine\n", "a file that is in nobody's way stays"
    assert "simpletuner/helpers/plain.py. The changes are in" in (repository / artifacts.CHECKLIST).read_text()
    assert "+    return 'not committed'" in (repository / artifacts.UNCOMMITTED).read_text()
    assert (repository / "simpletuner/helpers/plain.py").read_text() != EDITED
    assert "as it was" in workflow.rollback(repository)
    assert (repository / "simpletuner/helpers/plain.py").read_text() == EDITED


def test_uncommitted_changes_survive_a_kill_and_the_script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(repository, {"simpletuner/helpers/plain.py": EDITED})
    interrupted(repository, "vendor config", monkeypatch)
    workflow.go_on(repository, silent)
    subprocess.run([repository / artifacts.ROLLBACK, "--yes"], check=True, capture_output=True)
    assert (repository / "simpletuner/helpers/plain.py").read_text() == EDITED


# -- back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["backup", "fresh branch", "vendor config"])
def test_rollback_after_any_step(repository: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    original = run_git(repository, "rev-parse", "HEAD")
    interrupted(repository, step, monkeypatch)
    assert "as it was" in workflow.rollback(repository)
    assert run_git(repository, "rev-parse", "HEAD") == original
    assert run_git(repository, "branch", "--show-current") == "fork"
    assert run_git(repository, "status", "--porcelain") == ""
    assert not Repository(repository).has_branch(artifacts.BRANCH)


def test_rollback_leaves_no_half_copied_files(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_the_first_commit(repository, monkeypatch)
    workflow.rollback(repository)
    assert [p.name for p in (repository / "simpletuner/gh200").iterdir()] == ["uvm.py"]
    left = run_git(repository, "status", "--porcelain", "--ignored").splitlines()
    assert {line[3:] for line in left} == set(artifacts.OURS) - {artifacts.UNCOMMITTED}


def test_after_a_rollback_one_can_start_again(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    workflow.rollback(repository)
    interrupted(repository, "fresh branch", monkeypatch)
    assert workflow.status(repository).step("fresh branch").status == "started"


def test_rollback_never_resets_a_branch_that_moved(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    journal = workflow.status(repository)
    run_git(repository, "branch", "-f", "fork", "v2")
    assert f"the state of then is in {journal.backup_branch}" in workflow.rollback(repository)
    assert run_git(repository, "rev-parse", "fork") == run_git(repository, "rev-parse", "v2")


def test_start_and_status_in_json_are_one_line_each(repository: Path) -> None:
    words = ["start", "--repo", str(repository), "--onto", "v2", "--skip-tests", "--json"]
    for command in (words, ["status", "--repo", str(repository), "--json"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        (line,) = done.stdout.splitlines()
        told = json.loads(line)
        assert told["finished"] is True and told["onto_ref"] == "v2"
        assert {step["status"] for step in told["steps"]} <= {"done", "skipped"}


def test_rollback_asks_first(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    refused = CliRunner().invoke(app, ["rollback", "--repo", str(repository)], input="n\n")
    assert refused.exit_code == 1
    assert run_git(repository, "branch", "--show-current") == artifacts.BRANCH
    done = CliRunner().invoke(app, ["rollback", "--repo", str(repository), "--yes"])
    assert done.exit_code == 0, done.output
    assert run_git(repository, "branch", "--show-current") == "fork"


def test_the_script_goes_back_without_us(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(repository, "fresh branch", monkeypatch)
    script = repository / artifacts.ROLLBACK
    refused = subprocess.run([script], input="n\n", capture_output=True, text=True)
    assert refused.returncode == 1
    done = subprocess.run([script, "--yes"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run_git(repository, "branch", "--show-current") == "fork"


def test_without_a_rebase_there_is_nothing_to_continue(repository: Path) -> None:
    for action in (workflow.status, workflow.rollback, workflow.run_tests):
        with pytest.raises(UsageError, match="no rebase under way"):
            action(repository)  # type: ignore[operator]
