"""Packs: complete or absent, never believed when damaged, and never older than their sources."""

from __future__ import annotations

import errno
import os
import signal
import stat

import pytest
import torch

from simpletuner_gh200.cache import pack as pack_module
from simpletuner_gh200.cache.batch import DeviceDelivery, assemble
from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.pack import DamagedPack, Pack, PackWriter
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import folder_for
from simpletuner_gh200.cache.table import MISSING, Table

COUNT = 5


def fresh_table():
    return Table("packed", Control.create(64, label="packed", shared=False), look_for_nan=True)


def value(number):
    return {"latents": torch.full((100 + number * 80_000,), float(number)), "note": f"entry {number}"}


@pytest.fixture
def packed(tmp_path, saved):
    """A folder with one pack of COUNT entries, small ones and ones that are lent; (folder, paths)."""
    table = fresh_table()
    paths = [saved(value(number), f"src/{number}.pt") for number in range(COUNT)]
    assert all(take_in(table, path) for path in paths)
    folder = PackFolder(tmp_path / "packs")
    folder.make("src")
    assert folder.save(table, paths) > 0
    return folder.folder, paths


def load(folder, **options):
    table = fresh_table()
    return table, PackFolder(folder, **options).load(table, workers=2)


def check_all(table, paths):
    for number, path in enumerate(paths):
        got = table.get(path)
        assert got is not MISSING, path
        assert got["note"] == f"entry {number}"
        assert torch.equal(got["latents"], value(number)["latents"])
        got["latents"].fill_(-1)


def test_what_was_packed_is_served_after_a_start(packed):
    folder, paths = packed
    table, loaded = load(folder)
    assert (loaded.entries, loaded.changed, loaded.damaged) == (COUNT, 0, 0)
    check_all(table, paths)
    check_all(table, paths)
    assert table.statistics.fallbacks == {}


def test_batches_are_read_from_packs_and_none_goes_to_a_device_from_there(tmp_path, saved):
    """Whole entries, and a tensor that others lie in front of; some of them in memory."""
    for kind, wrap in (
        ("plain", lambda latent: latent),
        ("dict", lambda latent: {"mask": latent[:1].clone(), "latents": latent}),
    ):
        latents = [torch.randn(4, 8, 8) for _ in range(6)]
        paths = [saved(wrap(latent), f"{kind}/{number}.pt") for number, latent in enumerate(latents)]
        first, packs = fresh_table(), PackFolder(tmp_path / kind / "packs")
        packs.make(kind)
        assert all(take_in(first, path) for path in paths[:4]) and packs.save(first, paths)
        table, loaded = load(packs.folder)
        assert loaded.entries == 4 and all(take_in(table, path) for path in paths[4:])
        entries = table.find_all(paths)
        assert [entry.address is None for entry in entries] == [True] * 4 + [False] * 2
        leaves = [entry.layout.single or entry.layout.named["latents"] for entry in entries]
        assert torch.equal(assemble(entries, leaves, BufferPool()), torch.stack(latents))
        assert DeviceDelivery(copier=None).rows(entries, leaves) is None


def test_packs_are_private_and_read_only(packed):
    folder, _ = packed
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.pack")] == [0o400]


def test_entries_whose_source_changed_or_vanished_are_dropped(packed):
    folder, paths = packed
    torch.save(value(9), paths[0])
    os.remove(paths[1])
    table, loaded = load(folder)
    assert (loaded.entries, loaded.changed) == (COUNT - 2, 2)
    assert table.get(paths[0]) is MISSING
    assert table.get(paths[1]) is MISSING


def test_nothing_new_writes_nothing_and_something_new_is_added(packed, saved):
    folder, paths = packed
    table = fresh_table()
    packs = PackFolder(folder)
    packs.load(table, workers=1)
    assert packs.save(table, paths) == 0
    more = saved(value(1), "src/more.pt")
    assert take_in(table, more)
    assert packs.save(table, [*paths, more]) > 0
    assert len(packs.packs()) == 2
    again, loaded = load(folder)
    assert loaded.entries == COUNT + 1
    assert torch.equal(again.get(more)["latents"], value(1)["latents"])


def test_mostly_dead_packs_are_made_into_one(packed):
    folder, paths = packed
    for path in paths[1:]:
        torch.save(value(3), path)
    table = fresh_table()
    packs = PackFolder(folder)
    packs.load(table, workers=1)
    for path in paths[1:]:
        assert take_in(table, path)
    assert packs.save(table, paths) > 0
    assert len(packs.packs()) == 1
    _, loaded = load(folder)
    assert (loaded.entries, loaded.changed) == (COUNT, 0)


def test_a_flipped_byte_anywhere_is_never_served(packed):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    original = pack.read_bytes()
    for position in [0, 9, 50, 70, 4097, 4200, 5000, len(original) // 2, len(original) - 100, len(original) - 1]:
        damaged = bytearray(original)
        damaged[position] ^= 0x40
        pack.write_bytes(damaged)
        table, loaded = load(folder)
        for number, path in enumerate(paths):
            got = table.get(path)
            assert got is MISSING or (
                torch.equal(got["latents"], value(number)["latents"]) and got["note"] == f"entry {number}"
            ), position
        assert loaded.entries < COUNT or loaded.damaged == 0
        pack.write_bytes(original)


def test_a_truncated_pack_is_removed_and_made_again(packed):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    os.truncate(pack, pack.stat().st_size - 10)
    with pytest.raises(DamagedPack, match="header says"):
        Pack(pack)
    table = fresh_table()
    packs = PackFolder(folder)
    assert packs.load(table, workers=1).entries == 0
    assert all(take_in(table, path) for path in paths)
    assert packs.save(table, paths) > 0
    assert load(folder)[1].entries == COUNT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_disk_leaves_the_old_state(packed, monkeypatch, caplog, number):
    folder, paths = packed
    torch.save(value(2), paths[0])
    table = fresh_table()
    packs = PackFolder(folder)
    packs.load(table, workers=1)
    assert take_in(table, paths[0])
    before = sorted(os.listdir(folder))

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("simpletuner_gh200.cache.pack._to_disk", full)
    with caplog.at_level("WARNING", "simpletuner_gh200"):
        assert packs.save(table, paths) == 0
    assert "free" in caplog.text
    assert sorted(os.listdir(folder)) == sorted({*before, ".lock"})


def test_another_job_at_the_same_folder_is_left_alone(packed):
    folder, paths = packed
    torch.save(value(2), paths[0])
    table = fresh_table()
    assert take_in(table, paths[0])
    first, second = PackFolder(folder), PackFolder(folder)
    with first.locked() as ours:
        assert ours
        assert second.save(table, paths) == 0
    assert second.save(table, paths) > 0


@pytest.mark.parametrize("in_memory", [True, False], ids=["held too", "nowhere else"])
def test_what_turns_out_damaged_while_packs_are_made_into_one_comes_from_memory_or_goes(packed, in_memory):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    packs, table = PackFolder(folder), fresh_table()
    packs.look_over()
    content = bytearray(pack.read_bytes())
    content[content.index(value(3)["latents"].numpy().tobytes()[:4096]) + 8] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    if in_memory:
        assert take_in(table, paths[3])
    assert packs.save(table, paths, into_one=True) > 0
    served, loaded = load(folder)
    assert (loaded.entries, loaded.damaged) == ((COUNT, 0) if in_memory else (COUNT - 1, 0))
    if in_memory:
        check_all(served, paths)


def test_an_index_that_comes_in_pieces_is_whole(packed, monkeypatch):
    """The kernel gives 2 GiB at a time; here it gives less."""
    folder, paths = packed
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: read(fd, min(length, 100), at))
    (pack,) = PackFolder(folder).packs()
    with Pack(pack) as opened:
        assert sorted(entry.path for entry in opened.entries()) == sorted(paths)


def test_names_stay_inside_the_folder(tmp_path):
    assert folder_for(tmp_path, "../../etc", "/x").parent == tmp_path
    assert folder_for(tmp_path, "a", "/x") != folder_for(tmp_path, "a", "/y")


def die_at(step):
    """In a forked child: run the writer's steps until the ``step``-th, with what it wrote so far on its way to disk."""
    done = 0

    def mortal(function):
        def counted(*args, **options):
            nonlocal done
            done += 1
            if done == step:
                if isinstance(args[0], PackWriter):
                    args[0]._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    os.fsync = lambda fd: None  # a process that dies takes no page cache with it
    PackWriter._put = mortal(PackWriter._put)
    pack_module._to_disk = mortal(pack_module._to_disk)
    pack_module._sync_folder = mortal(pack_module._sync_folder)
    for name in ("replace", "fchmod", "unlink"):
        setattr(os, name, mortal(getattr(os, name)))


def test_kill_9_at_any_step_leaves_the_old_state_or_the_new(packed):
    """The pack holds 0..4, two of them outdated; a writer that adds the new two dies at each of its steps in turn."""
    folder, paths = packed
    torch.save(value(0) | {"note": "new 0"}, paths[0])
    torch.save(value(1) | {"note": "new 1"}, paths[1])
    source = fresh_table()
    assert all(take_in(source, path) for path in paths)
    states = []
    for step in range(1, 20):
        child = os.fork()
        if child == 0:
            die_at(step)
            PackFolder(folder).save(source, paths)
            os._exit(0)
        os.waitpid(child, 0)
        table, loaded = load(folder)
        assert loaded.damaged == 0, step
        notes = [table.get(path)["note"] if table.find(path) else None for path in paths]
        assert notes[2:] == ["entry 2", "entry 3", "entry 4"], step
        assert notes[:2] in ([None, None], ["new 0", "new 1"]), step
        states.append(notes[0])
    assert states[0] is None, "it died before anything was written"
    assert states[-1] == "new 0", "it ended before its turn to die came"
    assert PackFolder(folder).save(source, paths) >= 0
    assert not list(folder.glob(".*.tmp")), "what the dead left is swept"


@pytest.mark.parametrize("written", [0, 2])
def test_packing_stops_at_the_next_entry_and_leaves_what_was_there(packed, saved, written, monkeypatch):
    """A failed run, or an interrupted one: nobody waits for whole packs."""
    folder, paths = packed
    table, _ = load(folder)
    more = [saved(value(number), f"src/more-{number}.pt") for number in range(4)]
    assert all(take_in(table, path) for path in more)
    added: list[str] = []
    original = PackWriter.add
    monkeypatch.setattr(PackWriter, "add", lambda self, item: (added.append(item.path), original(self, item)))
    before = sorted(folder.iterdir())
    counted: list[bool] = []

    def stop():
        counted.append(True)
        return len(added) >= written and len(counted) > len(paths + more)

    assert PackFolder(folder).save(table, paths + more, stop=stop) == 0
    assert len(added) == written
    assert [path for path in sorted(folder.iterdir()) if path.name != ".lock"] == [
        path for path in before if path.name != ".lock"
    ]
    again, loaded = load(folder)
    assert loaded.entries == COUNT
    check_all(again, paths)


def test_loading_ticks_at_every_entry(packed):
    folder, _ = packed
    ticks: list[int] = []
    PackFolder(folder).load(fresh_table(), workers=1, tick=lambda: ticks.append(1))
    assert len(ticks) == COUNT


def test_kill_9_while_packs_are_made_into_one_loses_nothing(packed, saved):
    """Two packs, of which one entry is twice; the writer dies at each of its steps, the removals included."""
    folder, paths = packed
    more = saved(value(2), "src/more.pt")
    source = fresh_table()
    assert all(take_in(source, path) for path in [*paths, more])
    assert PackFolder(folder).save(source, [more]) > 0
    for step in range(1, 30):
        child = os.fork()
        if child == 0:
            die_at(step)
            PackFolder(folder).save(fresh_table(), [*paths, more], into_one=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        table, loaded = load(folder)
        assert (loaded.entries, loaded.damaged, loaded.changed) == (COUNT + 1, 0, 0), step
        check_all(table, paths)
        table.close()
        if status == 0:
            break
    assert status == 0, "the last one came to its end"
    assert step > 10, "there were that many steps to die at"
    assert [path.name for path in folder.glob("*.pack")] == [max(path.name for path in folder.glob("*.pack"))]
