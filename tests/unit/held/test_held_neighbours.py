"""Others on the same machine: their packs and links are not ours, and the disk is not ours alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held import pack_place, packs, segment
from simpletuner_gh200.held.caches import Caches, Wanted
from simpletuner_gh200.held.pack_place import LOCK, MARKER, NotOurs, PackPlace, folder_for
from simpletuner_gh200.held.packs import DiskFull, PackFolder, must_stay_free
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.units import GIB, parse_bytes
from tests.unit.held.conftest import filled, packed_at
from tests.unit.nobody import NOBODY, as_nobody


def entries_in(folder):
    return sum(map(len, PackFolder(folder).open_all()))


@pytest.fixture
def packed(tmp_path, saved):
    """(folder of packs, paths), readable by everybody."""
    paths = [saved(torch.full((500,), float(number)), f"src/{number}.pt") for number in range(3)]
    made = packed_at(tmp_path / "cache_dir" / "packs", *paths, source=tmp_path / "src")
    made.folder.chmod(0o755)
    for pack in made.folder.glob("*.pack"):
        pack.chmod(0o444)
    return made.folder, paths


def loaded_by_nobody(folder):
    def work():
        raise SystemExit(10 + entries_in(folder))

    return as_nobody(work, folder) - 10


@pytest.fixture
def give_away(monkeypatch):
    """Make another user the owner; where this one has no right to, the two places that ask believe so."""
    if os.getuid() == 0:
        return lambda path: os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    given: set[int] = set()
    for module in (segment, pack_place):
        monkeypatch.setattr(module, "is_ours", lambda found: found.st_ino not in given)
    return lambda path: given.add(os.lstat(path).st_ino)


def test_packs_of_another_user_are_not_served_and_those_of_root_are(packed, give_away, caplog):
    folder, paths = packed
    assert loaded_by_nobody(folder) == len(paths), "root could do anything anyway"
    (pack,) = folder.glob("*.pack")
    give_away(pack)
    assert entries_in(folder) == 0
    assert "not to us" in caplog.text
    assert pack.exists(), "nor is it ours to remove"


def test_a_pack_that_others_may_write_to_is_not_served(packed):
    (pack,) = packed[0].glob("*.pack")
    pack.chmod(0o666)
    assert entries_in(packed[0]) == 0 and pack.exists()


def test_a_folder_of_another_user_is_not_used(packed, tmp_path, give_away, caplog):
    folder, _paths = packed
    give_away(folder)
    with pytest.raises(NotOurs, match=r"belongs to user \d+, not to us"):
        PackFolder(folder).open_all()
    wanted = Wanted("packs", "vae", str(tmp_path / "src"))
    root = tmp_path / "cache_dir"
    folder.rename(folder_for(root, wanted.name, wanted.folder))
    caches = Caches([wanted], allowed=None, group=NodeGroup.from_environment("test", {}), packs=root)
    caches.fill()
    assert "cache packs runs without packs" in caplog.text
    assert caches.report()["packs"]["entries"] == 3
    caches.save()
    caches.close()


def test_links_that_somebody_planted_are_not_followed_for_writing(packed, tmp_path, saved):
    """For the folder, the lock, the marker and what is written beside a pack."""
    folder, paths = packed
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / MARKER).unlink()
    (folder / MARKER).symlink_to(victim)
    with PackPlace.open(folder) as place:
        assert place.marked() is None, "a link says nothing"
    PackPlace.make(folder, str(tmp_path / "src"))
    assert not (folder / MARKER).is_symlink()
    assert victim.read_text() == "precious"
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "made-by-us")
    with pytest.raises(OSError, match="symbolic link"):
        PackFolder(folder).save(filled(*paths, saved(torch.ones(3), "src/new.pt")))
    assert not (tmp_path / "made-by-us").exists()


def test_a_draft_whose_name_was_guessed_is_not_written_through(packed, tmp_path, saved, monkeypatch):
    folder, paths = packed
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("simpletuner_gh200.held.pack_place.secrets.token_hex", lambda _: "guessed")
    cache = filled(*paths, saved(torch.ones(3), "src/new.pt"))
    monkeypatch.setattr(PackPlace, "sweep", lambda _place: None)  # planted just behind it
    (folder / f".00000002.pack.{os.getpid()}.guessed.tmp").symlink_to(victim)
    with pytest.raises((CacheError, OSError)):
        PackFolder(folder).save(cache)
    assert victim.read_text() == "precious"


def test_a_link_in_place_of_the_folder_is_refused(packed, tmp_path):
    folder, _paths = packed
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder, elsewhere)
    before = sorted(os.listdir(elsewhere))
    folder.symlink_to(elsewhere)
    for use in (lambda: PackPlace.make(folder, "x"), lambda: PackFolder(folder).open_all()):
        with pytest.raises(NotOurs, match="is a link"):
            use()
    assert sorted(os.listdir(elsewhere)) == before


def test_a_cache_dir_that_is_somebody_elses_link_is_refused_and_our_own_is_not(tmp_path, give_away):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    PackPlace.make(tmp_path / "link" / "packs", "x")
    assert (tmp_path / "real" / "packs" / MARKER).exists()
    give_away(tmp_path / "link")
    with pytest.raises(NotOurs, match=r"is a link of user \d+"):
        PackPlace.make(tmp_path / "link" / "packs", "x")


# -- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "threshold", "expected"),
    [(1000 * GIB, 0, 100 * GIB), (1000 * GIB, 50 * GIB, 100 * GIB), (1000 * GIB, 200 * GIB, 200 * GIB), (0, 0, 0)],
)
def test_a_tenth_of_the_disk_or_the_threshold_stays_free(total, threshold, expected):
    assert must_stay_free(total, threshold) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100G", 100 * GIB), ("1.5 tb", 1536 * GIB), ("4096", 4096), ("10 MB", 10 << 20), ("None", None), ("lots", None)],
)
def test_sizes_as_simpletuner_writes_them(text, expected):
    assert parse_bytes(text) == expected


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_packs_leave_the_room_that_checkpoints_need_and_say_so_once(packed, tmp_path, saved, caplog):
    folder, _paths = packed
    cache = filled(saved(torch.ones(300_000), "src/new.pt"))
    before = sorted(os.listdir(folder))
    full = PackFolder(folder, keep_free=free_bytes(tmp_path) + GIB)
    assert full.save(cache) == 0
    assert full.save(cache) == 0
    assert sorted(os.listdir(folder)) == before
    reported = [record.message for record in caplog.records if "no pack written" in record.message]
    assert len(reported) == 1
    assert "stay free for checkpoints" in reported[0]
    assert PackFolder(folder).save(cache) > 0


def test_a_disk_that_fills_up_while_a_pack_is_written_stops_it(packed, monkeypatch, saved):
    folder, _paths = packed
    cache = filled(*(saved(torch.ones(5_000) * number, f"src/new{number}.pt") for number in range(8)))
    monkeypatch.setattr(packs, "LOOK_EVERY", 40_000)
    before, asked = sorted(os.listdir(folder)), []

    def filling_up(folder, needed, keep_free):
        asked.append(needed)
        if len(asked) == 3:
            raise DiskFull("it is full")

    monkeypatch.setattr(packs, "check_disk", filling_up)
    assert PackFolder(folder).save(cache) == 0
    assert len(asked) == 3
    assert asked == sorted(asked, reverse=True)
    assert sorted(os.listdir(folder)) == before, "the half that was written is gone"
