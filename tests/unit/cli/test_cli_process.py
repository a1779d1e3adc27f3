"""Odd surroundings: closed streams, a full disk behind the output, another locale, no more threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.cli import main as cli
from simpletuner_gh200.held.listing import cache_files
from tests.unit.held.held_samples import fill, image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "data", {"a.png": image(), "b.txt": b"caption"})
    return tmp_path / "data"


def stage(folder: Path, redirection: str, **options) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m simpletuner_gh200 stage "{folder}" {redirection}'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)


def test_closed_error_output_changes_nothing(folder):
    ran = stage(folder, "2>&- <&-")
    assert ran.returncode == 0
    assert "2 of 2 files" in ran.stdout


def test_output_that_can_not_be_written_is_one_line_and_an_error(folder):
    ran = stage(folder, ">/dev/full")
    assert ran.returncode == 1
    assert ran.stderr.startswith("gh200: the output could not be written: No space left on device\n  remedy: ")
    assert len(ran.stderr.splitlines()) == 2


def run(monkeypatch, capsys, failing) -> tuple[int, str]:
    monkeypatch.setattr(cli, "build_app", lambda: failing)
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0), capsys.readouterr().err


def test_no_more_threads_is_one_line(monkeypatch, capsys):
    def failing(**_options):
        raise RuntimeError("can't start new thread")

    code, said = run(monkeypatch, capsys, failing)
    assert code == 1
    assert said == "gh200: no thread can be started: this user has as many as allowed\n  remedy: raise `ulimit -u`\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    def failing(**_options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "build_app", lambda: failing)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_a_locale_without_the_characters_replaces_them():
    code = (
        "from simpletuner_gh200.cli.terminal import prepare_process; prepare_process(); print('\\u2581\\u2588 \\u2192')"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "?? ?\n", "")


def test_what_is_no_file_is_no_cache_file(tmp_path):
    """Opening a FIFO would wait for a writer, for ever."""
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "entry.pt").write_bytes(b"content")
    found = cache_files(str(tmp_path))
    assert (list(found.paths()), found.size) == ([str(tmp_path / "entry.pt")], 7)
