"""Too large, estimates and printable names: pure decisions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simpletuner_gh200.held.codecs import NAMES, choose, codec, estimate
from simpletuner_gh200.held.listing import list_files
from simpletuner_gh200.held.staging import too_large
from simpletuner_gh200.held.staging_report import FileProblem, FileProblems
from simpletuner_gh200.memory.ceilings import Allowance
from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.units import GIB
from tests.unit.held.held_samples import fill


def test_the_error_says_needed_allowed_and_what_would_fit(tmp_path: Path) -> None:
    listing = list_files(fill(tmp_path, {"a.txt": b"again " * 20_000}))
    raw = choose(None, listing)
    error = too_large(listing, raw, Allowance(10 * 1024, "memory_limit_gb 10"), 20 * GIB, exact=True)
    assert "needs 20 GiB" in str(error)
    assert "10 KiB is allowed (memory_limit_gb 10)" in str(error)
    assert "lz4 (about " in str(error) and "which would fit" in str(error)
    hopeless = too_large(listing, raw, Allowance(10, "x"), 20 * GIB, exact=True)
    assert "no compression makes it fit (at best about " in str(hopeless)


def test_estimates_follow_the_content(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"again " * 20_000, "b.bin": os.urandom(100_000)})
    listing = list_files(tmp_path)
    assert 100_000 <= estimate(listing, codec("lz4")) < 110_000
    assert estimate(listing, codec("raw")) == listing.size


def test_raw_unless_asked(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt": b"again " * 2000})
    assert not choose(None, list_files(tmp_path)).compresses
    assert choose("zstd", list_files(tmp_path)).for_extension("txt").name == "zstd"
    assert choose("auto", list_files(tmp_path)).for_extension("txt").name == "lz4"


@pytest.mark.parametrize("name", NAMES)
def test_codecs_give_back_what_they_got(name) -> None:
    used = codec(name)
    for content in (b"", b"x", b"again " * 5000, os.urandom(70_000)):
        packed = used.compress(memoryview(content))
        assert bytes(used.decompress(memoryview(bytes(packed)), len(content))) == content


def test_names_cannot_steer_a_terminal() -> None:
    shown = printable(b"/a/\x1b[31m\n\xff.png")
    assert shown == "/a/\\x1b[31m\\n\\udcff.png"
    assert str(FileProblem(b"/a\x07", "vanished", "gone")) == "/a\\x07: vanished (gone)"


def test_problems_are_counted_even_beyond_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletuner_gh200.held.staging_report.KEPT", 2)
    problems = FileProblems()
    for _ in range(5):
        problems.add(FileProblem(b"/a", "unreadable"))
    problems.add(FileProblem(b"/b", "vanished"))
    assert (len(problems), len(list(problems)), problems.broken) == (6, 2, 5)
