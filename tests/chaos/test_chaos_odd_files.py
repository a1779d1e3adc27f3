"""What is no ordinary file, and names nobody would choose: passed by or reported, never waited for, never shown raw."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.chaos.representatives import only
from tests.chaos.small_packs import ENTRIES, write_packs
from tests.unit.held.held_samples import fill, image


def add_odd_files(folder: Path, suffix: str) -> None:
    """One of each that no reader should wait for or fall over."""
    os.mkfifo(folder / f"fifo{suffix}")
    (folder / f"folder{suffix}").mkdir()
    (folder / f"dangling{suffix}").symlink_to(folder / "nowhere")
    (folder / f"loop{suffix}").symlink_to(folder / f"loop{suffix}")
    (folder / f"empty{suffix}").touch()
    here = os.open(folder, os.O_RDONLY)
    try:  # through the descriptor: a socket's address is limited to 108 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/socket{suffix}")
    finally:
        os.close(here)


def add_odd_names(folder: Path, suffix: str, content: bytes) -> None:
    for name in (b"red\x1b[31m\x07bell", b"new\nline\rback", b"\xff\xfe not utf-8", "\u202eright to left".encode()):
        with open(os.fsencode(folder) + b"/" + name + suffix.encode(), "wb") as file:
            file.write(content)


def raw_controls(text: str) -> set[str]:
    return {sign for sign in text if (ord(sign) < 32 and sign != "\n") or sign in "\x7f\u202e"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "data", {f"{number}.png": image(shade=number) for number in range(4)})


@pytest.mark.parametrize("as_json", only([True], [True, False]))
def test_staging_passes_odd_files_by(folder, start, as_json):
    add_odd_files(folder, ".png")
    ended = start("stage", folder, *(["--json"] if as_json else [])).end()
    assert "Traceback" not in ended.err, ended.explain()
    assert ended.code == 1, ended.explain()
    if as_json:
        found = json.loads(ended.out.splitlines()[-1])
        assert found["files"] == 5, "the four images and the empty one: nothing else there is a file"
        assert any("empty.png" in json.dumps(problem) for problem in found["problems"]), found
    else:
        assert "of 5 files" in ended.out and "empty.png" in ended.out, ended.explain()


@pytest.mark.chaos
@pytest.mark.parametrize("content", [image(), b"no image"], ids=["good", "broken"])
def test_names_reach_no_terminal_raw(folder, start, content):
    add_odd_names(folder, ".png", content)
    ended = start("stage", folder).end()
    assert ended.code == (0 if content == image() else 1), ended.explain()
    assert "Traceback" not in ended.err
    assert raw_controls(ended.out + ended.err) == set(), ended.explain()


def test_odd_cache_files_are_no_entries(tmp_path, start):
    root, _ = write_packs(tmp_path)
    add_odd_files(tmp_path / "vae", ".pt")
    add_odd_names(tmp_path / "vae", ".pt", b"no tensor")
    listed = start("cache", "ls", root, "--json").end()
    (packed,) = json.loads(listed.out.splitlines()[-1])["caches"]
    assert (listed.code, packed["fresh"]) == (0, ENTRIES) and raw_controls(listed.out) == set(), listed.explain()


@pytest.mark.chaos
def test_odd_files_among_caches_train_the_same(packed, train):
    """SimpleTuner's own look at the images is its own; what is ours to list are its cache files."""
    for kind in ("vae", "text"):
        some = sorted((packed.project.folder / "cache" / kind).rglob("*.pt"))[0].parent
        add_odd_files(some, ".pt")
        add_odd_names(some, ".pt", b"no tensor")
    try:
        packed.assert_trained_the_same(train(packed).end_of_all())
    finally:
        packed.put_back()
