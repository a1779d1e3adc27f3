"""One folder of packs, several jobs and budgets: nothing valid is thrown away, nothing is written twice, and whatever
is done to a pack in use costs no more than its entries."""

from __future__ import annotations

import os
import struct
from functools import partial

import pytest
import torch

from simpletuner_gh200.cache.batch import assemble
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import read_through, take_in
from simpletuner_gh200.cache.pack import HEADER_SIZE, MAGIC, SCHEMA, Pack
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import folder_for
from simpletuner_gh200.cache.pack_segment import DamagedEntry
from simpletuner_gh200.cache.service import Caches, Wanted
from simpletuner_gh200.cache.table import DAMAGED, MISSING, Table
from simpletuner_gh200.memory.sharing import NodeGroup

COUNT = 40
ENTRY = 4096


@pytest.fixture
def wanted(tmp_path, saved):
    for number in range(COUNT):
        saved(torch.full((ENTRY // 4,), float(number)), f"cache/{number:02}.pt")
    return Wanted("c", "vae", str(tmp_path / "cache"))


def path_of(wanted, number):
    return f"{wanted.folder}/{number:02}.pt"


def start(wanted, packs, allowed=None):
    return Caches([wanted], allowed=allowed, group=NodeGroup.from_environment("test", {}), packs=packs, workers=2)


def run(wanted, packs, allowed=None):
    """One whole run; what it found in the packs."""
    caches = start(wanted, packs, allowed)
    try:
        caches.fill()
        caches.save()
        return caches.loaded["c"]
    finally:
        caches.close()


def sizes(packs):
    return {path.name: path.stat().st_size for path in packs.rglob("*.pack")}


def check_values(table, wanted, expected=COUNT):
    values = [table.get(path_of(wanted, number)) for number in range(COUNT)]
    right = [value is not MISSING and bool((value == number).all()) for number, value in enumerate(values)]
    assert sum(right) == expected
    assert sum(value is MISSING for value in values) == COUNT - expected


def test_a_run_with_less_memory_throws_no_valid_entry_away(wanted, tmp_path):
    run(wanted, tmp_path / "packs")
    before = sizes(tmp_path / "packs")
    small = run(wanted, tmp_path / "packs", allowed=COUNT * ENTRY // 3)
    assert 0 < small.entries < COUNT // 2
    assert small.entries + small.left_out == COUNT
    assert sizes(tmp_path / "packs") == before
    assert run(wanted, tmp_path / "packs").entries == COUNT


def test_entries_without_room_survive_when_packs_are_made_into_one(wanted, tmp_path, saved):
    run(wanted, tmp_path / "packs")
    for number in range(COUNT * 3 // 4):  # most are made anew: what is packed of them is dead
        saved(torch.full((ENTRY // 4,), float(number)), f"cache/{number:02}.pt")
    run(wanted, tmp_path / "packs", allowed=COUNT * ENTRY // 4)
    assert len(sizes(tmp_path / "packs")) == 1
    (folder,) = (tmp_path / "packs").iterdir()
    alive = PackFolder(folder)
    assert alive.look_over().changed == 0
    untouched = {path_of(wanted, number) for number in range(COUNT * 3 // 4, COUNT)}
    assert untouched <= set(alive.held), "no room for them in memory is no reason to lose them"


def leader(wanted, folder):
    """A job that has looked for packs, found none, and filled its table from SimpleTuner's files."""
    packs, table = PackFolder(folder), Table("c", Control.create(64, label="c", shared=False))
    packs.make(wanted.folder)
    assert packs.load(table, workers=1).entries == 0
    assert all(take_in(table, path_of(wanted, number)) for number in range(COUNT))
    return packs, table


def test_several_leaders_on_one_folder_write_one_copy(wanted, tmp_path):
    """All of them start before any has written: nodes on a shared output folder, or two jobs."""
    paths = [path_of(wanted, number) for number in range(COUNT)]
    folder = folder_for(tmp_path / "packs", wanted.name, wanted.folder)
    leaders = [leader(wanted, folder) for _ in range(3)]
    assert [packs.save(table, paths) > 0 for packs, table in leaders] == [True, False, False]
    once = sizes(tmp_path / "packs")
    assert len(once) == 1
    for _ in range(2):
        assert run(wanted, tmp_path / "packs").entries == COUNT
        assert sizes(tmp_path / "packs") == once, "nothing is written again"


def test_what_another_leader_lacked_is_added_once(wanted, tmp_path, saved):
    folder = folder_for(tmp_path / "packs", wanted.name, wanted.folder)
    (first, held), (second, more) = leader(wanted, folder), leader(wanted, folder)
    new = saved(torch.full((ENTRY // 4,), 7.0), "cache/new.pt")
    assert take_in(more, new)
    paths = [path_of(wanted, number) for number in range(COUNT)]
    first.save(held, paths)
    second.save(more, [*paths, new])
    entries = [len(Pack(path)) for path in sorted(folder.glob("*.pack"))]
    assert entries == [COUNT, 1]


@pytest.mark.parametrize("harm", ["truncate", "overwrite", "remove"])
def test_a_run_survives_what_is_done_to_its_packs(wanted, tmp_path, harm):
    """In a child: what is wrong here would end it by a signal. An entry that was served before is no exception."""
    run(wanted, tmp_path / "packs")
    (pack,) = (tmp_path / "packs").rglob("*.pack")
    left = COUNT if harm == "remove" else 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            caches = start(wanted, tmp_path / "packs")
            caches.fill()
            assert caches.loaded["c"].entries == COUNT
            table, paths = caches.tables["c"], [path_of(wanted, number) for number in range(COUNT)]
            check_values(table, wanted)
            entries = table.find_all(paths)
            pack.chmod(0o600)
            size = pack.stat().st_size
            if harm == "remove":
                pack.unlink()
            else:
                with pack.open("r+b") as file:
                    file.truncate(0)
                    file.write(b"x" * (size if harm == "overwrite" else 0))
            if not left:
                with pytest.raises(DamagedEntry):
                    assemble(entries, [entry.layout.single for entry in entries], BufferPool())
            check_values(table, wanted, left)
            assert table.statistics.fallbacks == ({} if left else {DAMAGED: COUNT})
            read = [read_through(table, path, partial(torch.load, path)) for path in paths]
            assert all(bool((value == number).all()) for number, value in enumerate(read))
            check_values(table, wanted)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("harm", ["truncate", "overwrite"])
def test_harm_between_opening_a_pack_and_reading_it_costs_its_entries_alone(wanted, tmp_path, harm):
    run(wanted, tmp_path / "packs")
    (path,) = (tmp_path / "packs").rglob("*.pack")
    path.chmod(0o600)
    with Pack(path) as pack:
        middle = list(pack.entries())[COUNT // 2].offset
    table = Table("c", Control.create(64, label="c", shared=False))
    assert PackFolder(path.parent).load(table, workers=1).entries == COUNT
    with path.open("r+b") as file:
        if harm == "truncate":
            file.truncate(middle)
        else:
            file.seek(middle)
            file.write(b"x" * ENTRY * COUNT)
    check_values(table, wanted, COUNT // 2)
    assert len(table.damaged) == COUNT - COUNT // 2


def test_no_pack_is_mapped(wanted, tmp_path):
    run(wanted, tmp_path / "packs")
    caches = start(wanted, tmp_path / "packs")
    caches.fill()
    with open("/proc/self/maps") as maps:
        assert ".pack" not in maps.read()
    caches.close()


def test_a_damaged_entry_is_made_again_and_its_bytes_are_dead(wanted, tmp_path):
    run(wanted, tmp_path / "packs")
    (path,) = (tmp_path / "packs").rglob("*.pack")
    with Pack(path) as pack:
        first = next(pack.entries())
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(first.offset)
        file.write(b"\xff" * 16)
    caches = start(wanted, tmp_path / "packs")
    caches.fill()
    check_values(caches.tables["c"], wanted, COUNT - 1)
    assert take_in(caches.tables["c"], first.path)
    caches.save()
    caches.close()
    again = start(wanted, tmp_path / "packs")
    again.fill()
    check_values(again.tables["c"], wanted)
    again.close()
    assert len(sizes(tmp_path / "packs")) == 2, "a second, small pack has it"


def emptied_folder(wanted, tmp_path):
    run(wanted, tmp_path / "packs")
    (pack,) = (tmp_path / "packs").rglob("*.pack")
    pack.unlink()
    return pack.parent


def test_packs_of_an_older_version_are_absent_and_go_once_there_are_new_ones(wanted, tmp_path):
    folder = emptied_folder(wanted, tmp_path)
    old = folder / "00000001.pack"
    old.write_bytes(MAGIC + struct.pack("<II", SCHEMA - 1, 0) + bytes(HEADER_SIZE))
    old.chmod(0o600)
    assert run(wanted, tmp_path / "packs").entries == 0
    assert not old.exists()
    assert run(wanted, tmp_path / "packs").entries == COUNT


def test_packs_of_a_newer_version_are_left_to_it(wanted, tmp_path):
    folder = emptied_folder(wanted, tmp_path)
    newer = folder / "00000001.pack"
    newer.write_bytes(MAGIC + struct.pack("<II", SCHEMA + 1, 0) + bytes(HEADER_SIZE))
    newer.chmod(0o600)
    run(wanted, tmp_path / "packs")
    assert newer.exists()
    assert run(wanted, tmp_path / "packs").entries == COUNT
