"""Another user on the same machine: what they plant is not served, not followed, and not in the way."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.chaos.commands import without_roots_rights
from tests.chaos.small_packs import write_packs
from tests.unit.held.held_samples import fill, image
from tests.unit.nobody import NOBODY


@pytest.fixture
def give_away():
    """Make another user the owner of a file or link."""
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    return lambda path: os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def test_unreadable_images_are_named(tmp_path, start):
    folder = fill(tmp_path / "data", {f"{number}.png": image(shade=number) for number in range(4)})
    (folder / "2.png").chmod(0)
    ended = start("stage", folder, limit=without_roots_rights).end()
    assert ended.code == 1, ended.explain()
    assert "3 of 4 files" in ended.out and "2.png" in ended.out and "Traceback" not in ended.err, ended.explain()


def test_planted_packs_are_not_believed(tmp_path, start, give_away):
    root, pack = write_packs(tmp_path)
    give_away(pack)
    ended = start("cache", "verify", root).end()
    assert ended.code == 1, ended.explain()
    assert str(NOBODY) in ended.out and "Traceback" not in ended.err, ended.explain()


@pytest.mark.chaos
def test_planted_links_are_not_followed(tmp_path, start, give_away):
    root, pack = write_packs(tmp_path)
    victim = tmp_path / "victim"
    shutil.copytree(pack.parent, victim)
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    shutil.rmtree(pack.parent)
    pack.parent.symlink_to(victim)
    give_away(pack.parent)
    ended = start("cache", "drop", root).end()
    assert "Traceback" not in ended.err, ended.explain()
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before


@pytest.mark.chaos
@pytest.mark.only_release("4.")
@pytest.mark.parametrize("kind", ["packs", "links"])
def test_a_run_among_planted_things_trains_the_same(packed, train, tmp_path, give_away, kind):
    """Packs of theirs with other tensors in them; a link in the place of a folder of ours."""
    victim = tmp_path / "victim"
    victim.mkdir()
    for cache in [path for path in packed.packs.iterdir() if path.is_dir()]:
        packs = sorted(cache.glob("*.pack"))
        if kind == "packs":
            for pack in packs:
                give_away(pack)
            continue
        shutil.rmtree(cache)
        cache.symlink_to(victim)
        give_away(cache)
    command = train(packed)
    ended = command.end_of_all()
    assert list(victim.iterdir()) == []
    packed.assert_trained_the_same(ended)
