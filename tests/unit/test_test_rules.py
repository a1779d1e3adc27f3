"""The rules that the tests themselves are run by: what runs on every release, and what may be skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.dev import test as dev_test
from tests import releases, skips

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def late():\n    from simpletuner.helpers import state",
        "pytest.importorskip('accelerate')",
        "PACKAGE = installed_package('simpletuner')",
        "find_spec('simpletuner.helpers.caching')",
    ],
)
def test_a_file_that_imports_or_names_what_differs_runs_on_every_release(tmp_path: Path, source: str) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(source)
    assert releases.depends(path)


@pytest.mark.parametrize(
    "source", ["import numpy", "from simpletuner_gh200.units import MIB", "'''simpletuner is named in a text'''"]
)
def test_any_other_runs_once(tmp_path: Path, source: str) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(source)
    assert not releases.depends(path)


def test_a_conftest_counts_for_its_folder() -> None:
    files = list(releases.files_of(releases.TESTS / "unit" / "held" / "test_of_tomorrow.py"))
    assert releases.TESTS / "unit" / "held" / "conftest.py" in files
    assert any(map(releases.depends, files[1:])), "its fixtures save with torch"


def pytest_in(folder: Path, plugin: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", plugin, "--rootdir", str(folder), "-c", os.devnull, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(("tested", "ran"), [("1.0,{here}", 2), ("{here}", 3)])
def test_what_is_not_up_to_the_release_runs_on_one_of_those_that_are_tested(
    tmp_path: Path, tested: str, ran: int
) -> None:
    """On the one that is named, or where that is not among them, on whichever is."""
    here = releases.installed()
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n"
        f"@pytest.mark.only_release({here!r})\ndef test_here():\n    pass\n\n"
        "@pytest.mark.only_release('1.')\ndef test_elsewhere():\n    pass\n\n"
        "def test_everywhere():\n    pass\n"
    )
    found = pytest_in(tmp_path, "tests.releases", GH200_RELEASES=tested.format(here=here))
    assert f"{ran} passed" in found.stdout, found.stdout


def test_a_skip_is_allowed_for_its_reason_only() -> None:
    place = "tests/gpu/test_memory_gpu.py::test_x"
    assert skips.allowed(place, "Skipped: no CUDA device")
    assert not skips.allowed(place, "Skipped: no gcc to build with")
    assert not skips.allowed("tests/unit/operate/test_operate_report.py::test_x", "Skipped: no Chromium")


@pytest.mark.parametrize(("asked", "code"), [("1", 1), ("", 0)])
def test_a_skip_that_is_not_allowed_fails_the_run_where_that_is_asked_for(
    tmp_path: Path, asked: str, code: int
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_passes():\n    pass\n\ndef test_skips():\n    pytest.skip('no browser here')\n"
    )
    ran = pytest_in(tmp_path, "tests.skips", GH200_NO_SKIPS=asked)
    assert ran.returncode == code, ran.stdout
    assert ("no browser here" in ran.stdout) == bool(code), "the reason is shown"


@pytest.mark.parametrize("what", ["", "matrix", "chaos", "cluster"])
def test_every_test_belongs_to_one_part_of_each_environment(what: str) -> None:
    chosen = dev_test.parts([(".venv", "9.1"), (".venv-8.0", "8.0")], what)
    assert [part.folder for part in chosen] == [".venv", ".venv-8.0", ".venv"]
    wanted = dev_test.SELECTIONS[what]
    first, other, once = ([word for word in part.marks.split(" and ") if word not in wanted] for part in chosen)
    assert (first, other, once) == (["releases"], ["releases"], ["not releases"])
    assert all(part.marks.startswith(wanted) for part in chosen), "and no part widens what was asked for"
    assert len({part.results for part in chosen}) == len(chosen), "no part writes over another's results"


def test_the_trials_of_all_environments_are_counted_together(tmp_path: Path) -> None:
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    counts = ((9, 1, 1, 2), (4, 0, 0, 0), (0, 0, 0, 0))
    files = [tmp_path / f"{number}.xml" for number in range(4)]
    for path, numbers in zip(files, counts, strict=False):
        path.write_text(suite.format(*numbers))
    assert dev_test.counted(files[:2]) == "9 passed, 2 failed, 2 skipped"
    assert dev_test.counted(files) == "9 passed, 4 failed, 2 skipped", "no tests, and no results at all, are failures"
    files[2].write_text(suite.format(3, 0, 0, 3))
    assert dev_test.counted(files[:3]) == "9 passed, 3 failed, 5 skipped", "so is one whose every test was skipped"
    assert dev_test.counted(files[:2], files[:1]) == "9 passed, 2 failed, 2 skipped", "its failures are known"
    assert dev_test.counted(files[:2], files[1:2]) == "9 passed, 3 failed, 2 skipped", "it failed otherwise"


def test_what_failed_is_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev_test, "ROOT", tmp_path)
    (tmp_path / ".cache").mkdir()
    part = dev_test.Part("it", "", "")
    part.log.write_text("many lines\n2 failed\n\n")
    cases = '<testcase classname="tests.unit.test_a" name="{}">{}</testcase>'
    rows = [("good", ""), ("bad[1]", "<failure/>"), ("worse", "<error/>"), ("none", "<skipped/>")]
    part.results.write_text(f"<testsuites>{''.join(cases.format(*row) for row in rows)}</testsuites>")
    named = ["on it: tests/unit/test_a.py::bad[1]", "on it: tests/unit/test_a.py::worse"]
    assert dev_test.failures(part) == named
    monkeypatch.setattr(dev_test, "MOST_NAMED", 1)
    assert dev_test.failures(part) == [named[0], "on it: and 1 more"]
    part.results.unlink()
    assert dev_test.failures(part) == ["on it: otherwise: 2 failed"]


@pytest.mark.parametrize(("skipped", "failed"), [(3, ["it"]), (2, [])])
def test_a_part_whose_every_test_was_skipped_has_failed(
    tmp_path: Path, monkeypatch, capsys, skipped: int, failed: list[str]
) -> None:
    monkeypatch.setattr(dev_test, "ROOT", tmp_path)

    def start(part: dev_test.Part, _what: str, _variables: dict[str, str]) -> subprocess.Popen[bytes]:
        part.log.write_text("")
        part.results.write_text(f'<testsuites><testsuite tests="3" skipped="{skipped}"/></testsuites>')
        return subprocess.Popen(["true"])

    monkeypatch.setattr(dev_test, "start", start)
    found = dev_test.run_side_by_side([dev_test.Part("it", "", "")], "cluster", {})
    assert [part.name for part in found] == failed
    assert ("no test ran" in capsys.readouterr().out) == bool(failed)


def test_a_part_that_hangs_is_interrupted_once_and_then_killed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(dev_test, "ROOT", tmp_path)
    monkeypatch.setattr(dev_test, "MOST_SECONDS", 0)
    monkeypatch.setattr(dev_test, "LAST_SECONDS", 2)
    sleeping = "import signal, time; {} time.sleep(600)"
    programs = {"obeys": sleeping.format(""), "deaf": sleeping.format("signal.signal(signal.SIGINT, signal.SIG_IGN);")}

    def start(part: dev_test.Part, _what: str, _variables: dict[str, str]) -> subprocess.Popen[bytes]:
        part.log.write_text(f"what {part.name} said")
        return subprocess.Popen([sys.executable, "-c", programs[part.name]], stderr=subprocess.DEVNULL)

    monkeypatch.setattr(dev_test, "start", start)
    parts = [dev_test.Part(name, "", "") for name in programs]
    assert sorted(part.name for part in dev_test.run_side_by_side(parts, "chaos", {})) == ["deaf", "obeys"]
    said = capsys.readouterr().out
    assert [said.count(f"... {name} takes more than") for name in programs] == [1, 1]
    assert all(f"what {name} said" in said for name in programs)


def test_signals_that_nohup_or_a_script_has_ignored_can_be_sent_by_tests() -> None:
    code = (
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3)]; import tests.conftest; "
        "print([signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3)])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[False, False, False]"
