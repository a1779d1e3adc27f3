"""C code of the package: built once, in a place that is the user's own, with a clear word where it can't be."""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from pathlib import Path

import pytest

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.compiled import CSource, private_folder


@pytest.fixture
def source(tmp_path: Path) -> CSource:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return CSource(path, "an answer", "guess")


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_compiled_once_into_a_private_folder(cache_home: Path, source: CSource) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(source.library())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    folder = cache_home / "simpletuner-gh200"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [entry.name for entry in folder.iterdir()] == [paths[0].name], "nothing half-built is left"


def test_an_open_folder_is_closed_again(cache_home: Path) -> None:
    (cache_home / "simpletuner-gh200").mkdir(mode=0o777)
    os.chmod(cache_home / "simpletuner-gh200", 0o777)
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700


def test_no_compiler_is_a_clear_message(cache_home: Path, source: CSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache_home))
    with pytest.raises(FeatureUnavailable, match="needs a C compiler") as refused:
        source.compile_to(cache_home / "x.so")
    assert "install gcc" in str(refused.value)


def test_a_failing_compiler_is_quoted(cache_home: Path, source: CSource, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = cache_home / "cc"
    compiler.write_text("#!/bin/sh\necho no headers here >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(cache_home))
    with pytest.raises(FeatureUnavailable, match="no headers here"):
        source.compile_to(cache_home / "x.so")


def test_what_is_shipped_is_used(cache_home: Path, source: CSource) -> None:
    source.compile_to(source.shipped)
    assert source.library() == source.shipped
    assert ctypes.CDLL(str(source.library())).answer() == 42


def test_a_changed_source_is_compiled_again(cache_home: Path, source: CSource) -> None:
    before = source.library()
    source.path.write_text("int answer(void) { return 43; }")
    after = source.library()
    assert before != after and ctypes.CDLL(str(after)).answer() == 43


def test_a_home_that_can_not_be_written_is_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FeatureUnavailable, match="no folder for what is compiled"):
        private_folder()
