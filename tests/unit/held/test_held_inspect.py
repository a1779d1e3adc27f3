"""``gh200 cache``: what people see, and that deleting stays inside."""

from __future__ import annotations

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from simpletuner_gh200.cli.commands.cache import app
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.held.inspect import drop, packed_caches
from simpletuner_gh200.held.pack_place import MARKER, PackPlace, folder_for
from tests.unit.held.conftest import packed_at


@pytest.fixture
def root(tmp_path, saved):
    """A cache_dir with one packed cache of three entries."""
    paths = [saved(torch.full((2000,), float(n)), f"vae/{n}.pt") for n in range(3)]
    source = str(tmp_path / "vae")
    packed_at(folder_for(tmp_path / "cache", "vae-x", source), *paths, source=source)
    (tmp_path / "cache" / "someone-elses").mkdir()
    (tmp_path / "cache" / "someone-elses" / "0001.pack").write_text("not ours")
    return tmp_path / "cache"


def run(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_ls_counts_entries_and_how_many_are_fresh(root, tmp_path):
    torch.save(torch.ones(1), tmp_path / "vae" / "0.pt")
    code, answer = run("ls", root, "--json")
    assert code == 0
    (cache,) = answer["caches"]
    assert (cache["entries"], cache["fresh"], cache["packs"]) == (3, 2, 1)
    assert cache["source"] == str(tmp_path / "vae")


def test_verify_finds_a_flipped_byte(root):
    assert run("verify", root, "--json")[0] == 0
    (pack,) = root.glob("vae-x*/*.pack")
    content = bytearray(pack.read_bytes())
    content[4096 + 600] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    code, answer = run("verify", root, "--json")
    assert code == 1
    assert "damaged" in answer["problems"][0]


def test_drop_deletes_packs_and_nothing_else(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "gh200-cache").write_text("/x\n")
    (outside / "0001.pack").write_text("precious")
    (root / "link").symlink_to(outside)
    code, answer = run("drop", root, "--json")
    assert code == 0
    assert answer["caches"][0]["packs"] == 1
    assert not list(root.glob("vae-x*"))
    assert len(list((tmp_path / "vae").iterdir())) == 3, "SimpleTuner's files stay"
    assert (outside / "0001.pack").read_text() == "precious"
    assert (root / "someone-elses" / "0001.pack").exists()


def test_an_unknown_name_is_answered_with_those_there_are(root):
    with pytest.raises(UsageError, match="there are: vae-x"):
        packed_caches(root, ["nope"])


def test_drop_says_what_it_could_not_delete(root):
    (folder,) = root.glob("vae-x*")
    (folder / "00000009.pack").mkdir()
    code, answer = run("drop", root, "--json")
    assert code == 1
    assert "00000009.pack" in answer["problems"][0]
    assert os.listdir(folder) == ["00000009.pack"]


def test_commands_leave_packs_alone_that_another_job_is_writing(root):
    (cache,) = packed_caches(root)
    before = sorted(cache.folder.glob("*.pack"))
    with PackPlace.open(cache.folder) as place, place.locked() as ours:
        assert ours
        assert "another job is writing" in drop(cache)["problems"][0]
    assert sorted(cache.folder.glob("*.pack")) == before


def test_a_marker_that_was_cut_short_names_no_cache(root):
    """An empty name would be the working directory."""
    (marker,) = root.rglob(MARKER)
    marker.write_text("")
    assert packed_caches(root) == []
