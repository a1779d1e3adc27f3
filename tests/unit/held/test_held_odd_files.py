"""Whatever lies where cache files and packs are expected: it is passed over, the rest is served, and nothing hangs."""

from __future__ import annotations

import errno
import os
import socket

import pytest
import torch

from simpletuner_gh200.held.cache import MISSING
from simpletuner_gh200.held.fill import NOT_READ_NATIVELY
from simpletuner_gh200.held.listing import cache_files
from simpletuner_gh200.held.pack_place import LOCK, MARKER, PackPlace
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.source import identify
from tests.unit.bounded import bounded
from tests.unit.held.conftest import filled, packed_at


def put_odd_things(folder, name_of):
    """One of each kind of thing that is no file, and a file that can't be read; ``name_of`` gives names."""
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / name_of(1))
    with socket.socket(socket.AF_UNIX) as listening:
        there = os.open(folder, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{there}/{name_of(2)}")
        os.close(there)
    (folder / name_of(3)).mkdir()
    (folder / name_of(4)).symlink_to("/proc/self/mem")  # regular, of no size, and its first byte is an I/O error
    (folder / name_of(5)).symlink_to(name_of(5))
    (folder / name_of(6)).symlink_to("nowhere")
    (folder / name_of(7)).symlink_to("/dev/zero")


@bounded
def test_a_folder_of_cache_files_with_everything_else_in_it(tmp_path, saved):
    put_odd_things(tmp_path / "cache", lambda number: f"odd{number}.pt")
    (tmp_path / "cache" / "loop").symlink_to("loop")
    good = [saved(torch.full((8,), float(number)), f"cache/z{number}.pt") for number in range(3)]
    good.append(saved(torch.ones(8), "cache/odd3.pt/inside.pt"))
    paths = list(cache_files(str(tmp_path / "cache")).paths())
    unreadable = str(tmp_path / "cache" / "odd4.pt")
    assert sorted(paths) == sorted([*good, unreadable])
    cache = filled(*paths)
    assert all(cache.find(path) for path in good)
    assert cache.find(unreadable) is None
    assert cache.statistics.fallbacks == {NOT_READ_NATIVELY: 1, "unreadable: EOFError": 1}


@pytest.mark.parametrize("number", [1, 2, 3, 7])
@bounded
def test_a_cache_file_that_became_something_else_is_no_entry(tmp_path, number):
    put_odd_things(tmp_path / "cache", lambda number: f"odd{number}.pt")
    assert not filled(str(tmp_path / "cache" / f"odd{number}.pt")).shelf


@bounded
def test_a_cache_file_that_grows_as_fast_as_it_is_read_has_an_end(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(bytes(100_000))
    read, looked = os.pread, os.fstat

    def grown_by_reading(fd, length, at):
        got = read(fd, length, at)
        os.truncate(path, looked(fd).st_size + len(got))
        return got

    os.pread = grown_by_reading  # for good: in a child of its own
    now = os.stat(path)
    assert identify(str(path), (now.st_size, now.st_mtime_ns, now.st_ino)).size == 100_000


@pytest.fixture
def packed(tmp_path, saved):
    """(folder of packs, paths)."""
    paths = [saved(torch.full((500,), float(number)), f"src/{number}.pt") for number in range(4)]
    return packed_at(tmp_path / "packs", *paths).folder, paths


@bounded
def test_a_folder_of_packs_with_everything_else_in_it(packed, saved):
    folder, paths = packed
    put_odd_things(folder, lambda number: f"{number + 10:08}.pack")
    odd = sorted(os.listdir(folder))
    packs = PackFolder(folder)
    assert sum(map(len, packs.open_all())) == len(paths)
    assert len(packs.notes) == 7
    assert all(str(folder) in note for note in packs.notes), "each says which pack of which cache it is about"
    assert packs.save(filled(saved(torch.ones(9), "src/new.pt"))) > 0
    assert set(odd) <= set(os.listdir(folder)), "what is not ours is left alone"
    assert sum(map(len, PackFolder(folder).open_all())) == len(paths) + 1


@pytest.mark.parametrize("name", [LOCK, MARKER])
@bounded
def test_lock_and_marker_that_are_fifos_are_not_waited_for(packed, name):
    folder, paths = packed
    (folder / name).unlink()
    os.mkfifo(folder / name)
    packs = PackFolder(folder)
    PackPlace.make(packs.folder, "/somewhere/else")
    assert sum(map(len, packs.open_all())) == len(paths)
    assert packs.save(filled()) == 0


def test_an_io_error_in_a_pack_costs_the_entry_that_it_hits(packed, monkeypatch):
    """Of a disk, which nobody here has broken: so the call fails in its place."""
    folder, paths = packed
    (pack,) = PackFolder(folder).open_all()
    bad = int(pack.rows["offset"][1])
    original = os.preadv

    def failing(fd, buffers, offset, *flags):
        if offset <= bad < offset + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    cache = filled(packs=[pack])
    assert [path for path in paths if cache.get(path) is MISSING] == [pack.path(1)] == list(cache.damaged)
    assert cache.find(pack.path(1)) is None
