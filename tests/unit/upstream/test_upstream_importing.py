"""Does SimpleTuner import? Real child processes and real imports, of a SimpleTuner of a few lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import child, importing, user_cache
from simpletuner_gh200.upstream import tested as versions
from simpletuner_gh200.upstream.importing import check_import
from tests.unit.broken_site import HIDDEN, LAZILY_BROKEN, write_site
from tests.unit.few_options import TABLE


@pytest.fixture
def site(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SimpleTuner that is broken by a newer transformers, found before the real one by us and by the child."""
    site = tmp_path / "site"
    package = write_site(site, trainer=LAZILY_BROKEN, transformers="5.23.0")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(importing, "find_package", lambda _name: package)  # another test may have imported the real one
    monkeypatch.setattr(importing, "PROBE", (sys.executable, "-m", "simpletuner_gh200.seams.probe"))
    return site


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A SimpleTuner that is found and never imported."""
    package = tmp_path / "site" / "simpletuner"
    (package / "helpers" / "configuration").mkdir(parents=True)
    (package / "helpers" / "configuration" / "cmd_args.py").write_text("")
    monkeypatch.setattr(importing, "find_package", lambda _name: package)
    monkeypatch.setattr(importing, "installed_version", lambda _name: "9.9")
    return package


def rewrite_trainer(site: Path, source: str) -> None:
    """What is installed stays: by what is kept of it nothing has changed."""
    (site / "simpletuner" / "helpers" / "training" / "trainer.py").write_text(source)


def test_the_innermost_cause_in_one_line(site: Path) -> None:
    verdict = check_import()
    assert (verdict.imports, verdict.cause, verdict.version) == (False, f"ImportError: {HIDDEN}", "4.10.1")
    with pytest.raises(UsageError) as stopped:
        verdict.stop_unless_it_imports()
    line = str(stopped.value)
    assert "\n" not in line and HIDDEN in line and "Bloom" not in line
    assert "transformers 5.23.0, tested 5." in line and "`gh200 setup --release 4.10.1`" in line


def test_what_simpletuner_prints_is_not_the_answer(site: Path) -> None:
    """Release 4 colours all that is printed, up to the last line of the process."""
    write_site(site, trainer=f"import atexit; atexit.register(print, '\\033[0m'); print('{{}}')\n{LAZILY_BROKEN}")
    assert check_import().cause == f"ImportError: {HIDDEN}"


@pytest.mark.parametrize("trainer", [LAZILY_BROKEN, "import os; os.kill(os.getpid(), 9)"])
def test_a_failure_is_never_kept(site: Path, trainer: str) -> None:
    """What mends it may be no package of Python's, and the cache may be another machine's, too."""
    write_site(site, trainer=trainer)
    assert check_import().imports is False
    rewrite_trainer(site, "")
    assert check_import().imports is True


def test_a_deadline_that_passed_decides_nothing(site: Path) -> None:
    write_site(site, trainer="import time; time.sleep(600)")
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(child, "DEADLINE_SECONDS", 0.2)
        verdict = check_import()
    assert verdict.imports is None and "not done after 0.2 s" in str(verdict.cause)
    verdict.stop_unless_it_imports()
    rewrite_trainer(site, LAZILY_BROKEN)
    assert check_import().imports is False, "it was not kept"


@pytest.mark.parametrize(
    ("trainer", "imports", "cause"),
    [
        ("raise SystemExit('no GPU')", False, "SystemExit: no GPU"),
        ("raise ValueError('a\\nb   c') from None", False, "ValueError: a b c"),
        ("import os; os.kill(os.getpid(), 11)", False, "ended by signal 11"),
        ("import os; os._exit(3)", None, "exit code 3"),
        ("print('{}')", True, None),
    ],
)
def test_ends_of_an_import(site: Path, trainer: str, imports: bool | None, cause: str | None) -> None:
    write_site(site, trainer=trainer)
    verdict = check_import()
    assert verdict.imports is imports
    assert cause is None if verdict.cause is None else cause in verdict.cause


def test_the_child_has_no_extension_and_leaves_nothing_here(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It also finds the same packages as we do: the broken SimpleTuner is on our path only."""
    monkeypatch.setenv("SIMPLETUNER_GH200", "1")
    monkeypatch.chdir(tmp_path)
    write_site(
        site, trainer="import os; open('debug.log', 'w'); print('noise'); assert os.environ['SIMPLETUNER_GH200'] == '0'"
    )
    assert check_import().imports is True
    assert [path.name for path in tmp_path.iterdir()] == ["site"] and capfd.readouterr() == ("", "")


def test_without_bytecode_an_import_takes_a_minute_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PYTHONDONTWRITEBYTECODE", "1"), ("HF_HOME", "/x")):
        monkeypatch.setenv(name, value)
    found = child.child_environment()
    assert found["HF_HOME"] == "/x" and "PYTHONDONTWRITEBYTECODE" not in found
    assert all(Path(place).is_absolute() for place in found["PYTHONPATH"].split(":"))


def test_not_installed_is_the_same_kind_of_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "find_package", lambda _name: None)
    for verdict in (check_import(), check_import(trusting=True)):
        assert verdict.imports is False and verdict.table is None and "is not installed" in verdict.notes[0]
        with pytest.raises(UsageError, match="SimpleTuner is not installed in this environment: `gh200 setup`"):
            verdict.stop_unless_it_imports()


# -- trusting what was tested ------------------------------------------------------------------------------


def test_tested_versions_are_trusted(few_options: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "differing", lambda _release: {})
    said: list[str] = []
    assert check_import(said.append, trusting=True).imports is None
    check_import()
    assert check_import(said.append, trusting=True).imports is True and said == []


def test_what_differs_from_what_was_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = versions.tested_versions("4.10.1")
    same = {name: tested[name] for name in versions.FIRST}
    write_site(tmp_path, trainer="", **{**same, "torch": f"{tested['torch'].split('+')[0]}+cu130"})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert versions.differing("4.10.1") == {}
    assert versions.versions_in_words("4.10.1") == "versions as tested"
    write_site(tmp_path, trainer="", numpy="9.9", aiohttp="0.1", torch="2.99")
    words = f"torch 2.99, tested {tested['torch']}; numpy 9.9, tested {tested['numpy']}; aiohttp 0.1, tested "
    assert versions.versions_in_words("4.10.1").startswith(words)
    (tmp_path / f"peft-{tested['peft']}.dist-info").rename(tmp_path / "gone")
    assert f"peft missing, tested {tested['peft']}" in versions.versions_in_words("4.10.1")


# -- the options that the same child reads -----------------------------------------------------------------


def test_the_table_is_made_once_and_again_when_anything_changes(
    few_options: None, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for _ in range(2):
        found = check_import(said.append)
        assert (found.imports, found.table, found.notes) == (True, TABLE, ())
    assert len(said) == 1
    (here / "helpers" / "configuration" / "cmd_args.py").write_text("# changed")
    check_import(said.append)
    assert len(said) == 2
    check_import(said.append, refresh=True)
    assert len(said) == 3, "the doctor looks again"
    write_site(tmp_path / "in front", trainer="", torch="9.0")
    monkeypatch.syspath_prepend(tmp_path / "in front")
    check_import(said.append)
    assert len(said) == 4, "another version, in whatever folder"


def test_a_cache_that_cannot_be_written_costs_time_and_is_told(few_options: None, here: Path) -> None:
    (user_cache.cache_root() / importing.KIND).write_text("in the way")
    found = check_import()
    assert found.table == TABLE
    assert "read again at every start" in found.notes[0] and "XDG_CACHE_HOME" in found.notes[0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no such thing')", "exit code 1: ImportError: no such thing"),
        ("print('no answer')", "no answer"),
        ("print('[]')", "[]"),
        ('print(\'{"cause": null, "unread": "KeyError: x"}\')', "KeyError: x"),
        ('print(\'{"cause": null, "options": [1]}\')', "it is no table"),
    ],
)
def test_options_that_cannot_be_had_are_told_and_stop_nothing(
    private_cache: Path, here: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr(importing, "PROBE", (sys.executable, "-S", "-c", code))
    found = check_import()
    found.stop_unless_it_imports()
    assert found.table is None
    assert found.notes[0].startswith("SimpleTuner's own options were not checked: ") and reason in found.notes[0]
    assert not (private_cache / "simpletuner-gh200" / importing.KIND).exists(), "kept, though it may pass"


def test_a_torn_entry_is_made_again(few_options: None, here: Path) -> None:
    check_import()
    (entry,) = (user_cache.cache_root() / importing.KIND).iterdir()
    for torn in (
        '{"cause": null, "options": {"a": {"nonse',
        '{"cause": null}',
        "[]",
        '{"options": {"version": "9.9"}}',
    ):
        entry.write_text(torn)
        assert check_import().table == TABLE
