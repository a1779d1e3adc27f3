"""Whatever lies where cache files and packs are expected: it is passed over, the rest is served, and nothing hangs."""

from __future__ import annotations

import errno
import os
import socket

import pytest
import torch

from simpletuner_gh200.cache import pack as pack_module
from simpletuner_gh200.cache.batch_fill import NOT_READ_NATIVELY
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import fill, read_file, take_in
from simpletuner_gh200.cache.listing import cache_files
from simpletuner_gh200.cache.pack import Pack
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import LOCK, MARKER
from simpletuner_gh200.cache.source import identify, source_of
from simpletuner_gh200.cache.table import MISSING, Table
from tests.unit.bounded import bounded


def fresh_table():
    return Table("odd", Control.create(64, label="odd", shared=False))


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
    paths = [path for path, _size in cache_files(str(tmp_path / "cache"))]
    unreadable = str(tmp_path / "cache" / "odd4.pt")
    assert sorted(paths) == sorted([*good, unreadable])
    table = fresh_table()
    fill(table, paths, workers=2)
    assert all(table.find(path) for path in good)
    assert table.find(unreadable) is None
    assert table.statistics.fallbacks == {NOT_READ_NATIVELY: 1, "unreadable: EOFError": 1}
    table.close()


@pytest.mark.parametrize("number", [1, 2, 3, 7])
@bounded
def test_a_cache_file_that_became_something_else_is_no_entry(tmp_path, number):
    put_odd_things(tmp_path / "cache", lambda number: f"odd{number}.pt")
    table = fresh_table()
    assert not take_in(table, str(tmp_path / "cache" / f"odd{number}.pt"))
    table.close()


@bounded
def test_a_cache_file_that_grows_as_fast_as_it_is_read_has_an_end(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(bytes(100_000))
    read, looked, told = os.pread, os.fstat, []

    def grown_by_reading(fd, length, at):
        got = read(fd, length, at)
        os.truncate(path, looked(fd).st_size + len(got))
        return got

    def grown_by_looking(fd):
        found = looked(fd)
        told.append(found.st_size)
        os.truncate(path, found.st_size + 1000)
        return found

    os.pread = grown_by_reading  # for good: in a child of its own
    assert identify(str(path), source_of(str(path))).size == 100_000
    os.fstat = grown_by_looking
    assert len(read_file(str(path))) == told[-1]


@pytest.fixture
def packed(tmp_path, saved):
    """(folder of packs, paths)."""
    paths = [saved(torch.full((500,), float(number)), f"src/{number}.pt") for number in range(4)]
    table, packs = fresh_table(), PackFolder(tmp_path / "packs")
    assert all(take_in(table, path) for path in paths)
    packs.make(str(tmp_path / "src"))
    assert packs.save(table, paths) > 0
    return tmp_path / "packs", paths


@bounded
def test_a_folder_of_packs_with_everything_else_in_it(packed, saved):
    folder, paths = packed
    put_odd_things(folder, lambda number: f"{number + 10:08}.pack")
    odd = sorted(os.listdir(folder))
    table, packs = fresh_table(), PackFolder(folder)
    loaded = packs.load(table, workers=1)
    assert loaded.entries == len(paths)
    assert len(loaded.notes) == 7
    assert all(str(folder) in note for note in loaded.notes), "each says which pack of which cache it is about"
    new = saved(torch.ones(9), "src/new.pt")
    assert take_in(table, new)
    assert packs.save(table, [*paths, new]) > 0
    assert set(odd) <= set(os.listdir(folder)), "what is not ours is left alone"
    assert PackFolder(folder).load(fresh_table(), workers=1).entries == len(paths) + 1


@pytest.mark.parametrize("name", [LOCK, MARKER])
@bounded
def test_lock_and_marker_that_are_fifos_are_not_waited_for(packed, name):
    folder, paths = packed
    (folder / name).unlink()
    os.mkfifo(folder / name)
    packs, table = PackFolder(folder), fresh_table()
    packs.make("/somewhere/else")
    assert packs.load(table, workers=1).entries == len(paths)
    assert packs.save(table, paths) == 0


def test_an_io_error_in_a_pack_costs_the_entry_that_it_hits(packed, monkeypatch):
    """Of a disk, which nobody here has broken: so the call fails in its place."""
    folder, paths = packed
    (path,) = folder.glob("*.pack")
    with Pack(path) as pack:
        bad = list(pack.entries())[1]
    original = os.preadv

    def failing(fd, buffers, offset, *flags):
        if offset <= bad.offset < offset + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset, *flags)

    monkeypatch.setattr(pack_module.os, "preadv", failing)
    table = fresh_table()
    assert PackFolder(folder).load(table, workers=1).entries == len(paths)
    assert [path for path in paths if table.get(path) is MISSING] == [bad.path] == list(table.damaged)
    assert table.find(bad.path) is None
