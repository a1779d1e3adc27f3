"""``gh200 stage``: one JSON object, exit codes, and nothing left in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.held.held_samples import fill, image, open_memfds

Command = Callable[..., tuple[int, str, str]]


def test_json_is_one_object_with_what_is_promised(tmp_path: Path, gh200: Command) -> None:
    fill(tmp_path, {"a.png": image(), "a.txt": b"caption " * 500, "b.bin": os.urandom(5000)})
    before = open_memfds()
    code, out, _err = gh200("stage", tmp_path, "--compression", "auto", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["files"], found["staged"], found["problems"]) == (3, 3, [])
    assert found["held_bytes"] < found["bytes"]
    assert set(found["estimates"]) == {"lz4", "zlib", "snappy", "zstd"}
    assert open_memfds() == before


def test_broken_files_are_named_and_make_it_fail(tmp_path: Path, gh200: Command) -> None:
    fill(tmp_path, {"a.png": image(), "bad.png": b"no image"})
    code, out, _err = gh200("stage", tmp_path)
    assert code == 1
    assert "bad.png: image does not open (no decoder knows it)" in out


def test_what_does_not_fit_says_so(tmp_path: Path, gh200: Command) -> None:
    fill(tmp_path, {"a.bin": os.urandom(50_000)})
    code, _out, err = gh200("stage", tmp_path, "--memory-limit-gb", "0.00001")
    assert code == 1
    assert "48.8 KiB in memory, and 10.5 KiB is allowed" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--compression", "brotli"], "'brotli': accepted: 'lz4'"), (["--verify", "hope"], "'hope': accepted: 'header'")],
)
def test_wrong_options_are_quoted(tmp_path: Path, gh200: Command, arguments: list[str], words: str) -> None:
    code, _out, err = gh200("stage", tmp_path, *arguments)
    assert code == 2
    assert words in err


def test_a_missing_folder_is_a_usage_error(tmp_path: Path, gh200: Command) -> None:
    code, _out, err = gh200("stage", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_what_does_not_fit_is_one_object_too(gh200: Command, tmp_path: Path) -> None:
    fill(tmp_path, {"a.bin": os.urandom(3 << 20)})
    code, out, err = gh200("stage", tmp_path, "--memory-limit-gb", "0.001", "--json")
    assert code == 1
    found = json.loads(out.splitlines()[-1])
    assert (found["fits"], found["needed"]) == (False, 3 << 20)
    assert found["allowed"] < found["needed"]
    assert "the dataset needs 3 MiB" in err


def test_a_broken_link_is_said_and_no_failure(gh200: Command, tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": image()})
    (tmp_path / "b.png").symlink_to("nowhere")
    code, out, _err = gh200("stage", tmp_path, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["fits"], found["broken"]) == (True, 0)
    assert found["problem_counts"]


def test_no_name_steers_the_terminal(gh200: Command, tmp_path: Path) -> None:
    fill(tmp_path, {"x.\x1b[31mboo": b"a" * 1000})
    _code, out, _err = gh200("stage", tmp_path, "--compression", "auto")
    assert "\x1b" not in out
    assert "boo" in out
