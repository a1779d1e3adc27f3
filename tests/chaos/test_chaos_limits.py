"""Too little of everything: disk, descriptors, processes, stack, addresses, streams, letters, permission to write."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.chaos.commands import without_roots_rights
from tests.chaos.laboratory import FEATURES, STEPS
from tests.chaos.representatives import only
from tests.chaos.small_packs import write_packs
from tests.unit.held.held_samples import fill, image

MIB = 1 << 20
NO_STREAMS = "<&- >&- 2>&-"
REDIRECTIONS = ("<&-", ">&-", "2>&-", NO_STREAMS, ">/dev/full", "2>/dev/full")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "data", {f"{number}.png": image(shade=number) for number in range(40)})


def at_most(what, amount):
    def limit() -> None:
        resource.setrlimit(what, (amount, amount))

    return limit


LIMITS = {
    "descriptors": at_most(resource.RLIMIT_NOFILE, 32),
    "few-descriptors": at_most(resource.RLIMIT_NOFILE, 10),
    "addresses": at_most(resource.RLIMIT_AS, 900 * MIB),
    "few-addresses": at_most(resource.RLIMIT_AS, 200 * MIB),
    "file-size": at_most(resource.RLIMIT_FSIZE, 64 * 1024),
}


@pytest.mark.parametrize("name", only(["few-descriptors", "few-addresses"], LIMITS))
def test_staging_within_limits(folder, start, name):
    """It works, or says in a line what is missing; it never crashes."""
    ended = start("stage", folder, limit=LIMITS[name]).end()
    assert ended.code in {0, 1, 2}, ended.explain()
    assert "Traceback" not in ended.err, ended.explain()
    assert ("40 of 40 files" in ended.out) if ended.code == 0 else ended.err.startswith("gh200: "), ended.explain()


@pytest.mark.chaos
def test_no_more_processes(folder, start):
    if os.getuid() == 0:
        pytest.skip("root's processes are not counted")
    ended = start("stage", folder, limit=at_most(resource.RLIMIT_NPROC, 1)).end()
    assert ended.code in {0, 1} and "Traceback" not in ended.err, ended.explain()


@pytest.mark.parametrize("redirection", only([NO_STREAMS], REDIRECTIONS))
@pytest.mark.parametrize("words", only([["stage"]], [["stage"], ["doctor"]]), ids=" ".join)
def test_closed_and_full_streams(folder, start, words, redirection):
    asked = [*words, folder] if words == ["stage"] else words
    usual = start(*asked).end()
    ended = start(*asked, redirection=redirection).end()
    assert "Traceback" not in ended.err, ended.explain()
    if redirection == ">/dev/full":
        assert ended.code == 1 and "could not be written" in ended.err, ended.explain()
    elif redirection == ">&-" or redirection == NO_STREAMS:
        assert ended.code in {usual.code, 1}, ended.explain()
    else:
        assert ended.code == usual.code, ended.explain()


@pytest.mark.chaos
@pytest.mark.parametrize("words", [["doctor"], ["--help"], ["cache", "ls"], ["stage"]], ids=" ".join)
def test_a_locale_of_ascii(folder, tmp_path, start, words):
    (folder / "grün – ü.png").write_bytes(b"no image")
    asked = [*words, folder] if words == ["stage"] else words
    asked = [*words, write_packs(tmp_path)[0]] if words[0] == "cache" else asked
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = start(*asked, environment=plain).end()
    assert ended.code in {0, 1} and ended.out.isascii(), ended.explain()
    assert "Traceback" not in ended.err, ended.explain()


@pytest.mark.chaos
def test_a_pack_folder_that_is_read_only(tmp_path, start):
    root, pack = write_packs(tmp_path)
    before = pack.read_bytes()
    pack.parent.chmod(0o500)
    try:
        assert start("cache", "verify", root, limit=without_roots_rights).end().code == 0
        ended = start("cache", "drop", root, limit=without_roots_rights).end()
    finally:
        pack.parent.chmod(0o700)
    assert "Traceback" not in ended.err, ended.explain()
    assert pack.read_bytes() == before


def small_disk(folder: Path, kilobytes: int) -> list[str]:
    """Words before a command that give it, and nobody else, a small disk at ``folder``."""
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this container forbids namespaces")
    mount = f'mount -t tmpfs -o size={kilobytes}k none "{folder}" && exec "$@"'
    return [*unshare, "bash", "-c", mount, "bash"]


@pytest.mark.chaos
def test_a_full_temporary_folder(packed, train, tmp_path):
    full = tmp_path / "tmp"
    full.mkdir()
    command = train(packed, through=small_disk(full, 4), environment={"TMPDIR": str(full)})
    ended = command.end_of_all()
    if ended.code == 0:
        assert packed.bits() == packed.reference_bits()
        assert f"trained: {STEPS} of {STEPS} optimizer steps" in ended.err
    else:
        assert ended.last_line.startswith("gh200: training failed: "), ended.explain()


@pytest.mark.chaos
def test_a_full_output_folder(packed, train, tmp_path):
    """The checkpoint fails, so the run does, and says why. (The small disk is gone with the run.)"""
    command = train(packed, through=small_disk(packed.project.output, 64))
    ended = command.end_of_all()
    assert ended.code == 1, ended.explain()
    assert ended.last_line.startswith("gh200: training failed: "), ended.explain()
    assert f"the disk of {packed.project.output} is full" in ended.err, ended.explain()


@pytest.mark.chaos
@pytest.mark.only_release("4.")
def test_caches_where_nothing_may_be_written(packed, train, tmp_path):
    """Packs are a help, not a need."""
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o500)
    packed.configure(blocks={"cache_config": {**FEATURES["cache_config"], "cache_dir": str(shut)}})
    ended = train(packed, limit=without_roots_rights).end()
    assert ended.code in {0, 1, 2}, ended.explain()
    if ended.code == 0:
        assert packed.bits() == packed.reference_bits()
    else:
        assert str(shut) in ended.err and "Traceback" not in ended.last_line, ended.explain()


@pytest.mark.chaos
@pytest.mark.only_release("4.")
@pytest.mark.parametrize("redirection", ["<&-", ">&- 2>&-"])
def test_a_run_with_closed_streams(packed, train, redirection):
    ended = train(packed, redirection=redirection).end_of_all()
    assert ended.code == 0, ended.explain()
    assert packed.bits() == packed.reference_bits()
