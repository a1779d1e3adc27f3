"""Unit tests never touch the user's cache, and never wait for an import of SimpleTuner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simpletuner_gh200.upstream import importing, rules
from tests.unit.few_options import maker_of


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Not the user's; one for all tests, since what it holds is keyed by content."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, for tests that look into it or spoil it."""
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True, scope="session")
def no_import_of_simpletuner() -> Iterator[None]:
    """Reading its options would import it, in a child, for a quarter of a minute: here it fails at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importing, "PROBE", ("not-in-unit-tests",))
        patched.setattr(rules, "RULES", (sys.executable, "-S", "-c", "print('{\"refusals\": []}')"))
        yield


@pytest.fixture
def few_options(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that hands out a small table at once, and a place of the test's own in the cache to keep it."""
    folder = tmp_path_factory.mktemp("options")
    monkeypatch.setattr(importing, "PROBE", maker_of(folder))
    monkeypatch.setattr(importing, "KIND", folder.name)


@pytest.fixture
def gh200(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command itself, in this process: its exit code, standard output and standard error."""
    from simpletuner_gh200.cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gh200", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capfd.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run
