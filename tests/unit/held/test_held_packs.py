"""Packs: complete or absent, never believed when damaged, and never older than their sources; shared by jobs."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.held import pack_place
from simpletuner_gh200.held.batch import DeviceDelivery, assemble
from simpletuner_gh200.held.buffers import BufferPool
from simpletuner_gh200.held.cache import DAMAGED, MISSING
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.pack_place import PackPlace, folder_for
from simpletuner_gh200.held.packs import PackFolder
from simpletuner_gh200.held.segment import HEADER_SIZE, MAGIC, SCHEMA, DamagedEntry, SegmentWriter
from tests.unit.held.conftest import filled, packed_at
from tests.unit.held.held_samples import in_child

COUNT = 5


def value(number):
    return {"latents": torch.full((100 + number * 80_000,), float(number)), "note": f"entry {number}"}


@pytest.fixture
def packed(tmp_path, saved):
    """A folder with one pack of COUNT entries, small and large; (folder, paths)."""
    paths = [saved(value(number), f"src/{number}.pt") for number in range(COUNT)]
    return packed_at(tmp_path / "packs", *paths).folder, paths


def load(folder):
    """(a cache that serves the packs, what is in them)."""
    packs = PackFolder(folder)
    cache = filled(packs=packs.open_all())
    packs.recognise()
    return cache, packs.report()


def served(cache, paths):
    """Numbers whose entries come as they were packed, twice, since the first is written to."""
    right = []
    for _ in range(2):
        for number, path in enumerate(paths):
            got = cache.get(path)
            if got is not MISSING:
                assert got["note"] == f"entry {number}" and torch.equal(got["latents"], value(number)["latents"])
                got["latents"].fill_(-1)
                right.append(number)
    return sorted(set(right))


def overwrite(pack, change):
    """Change the bytes of a pack, which nobody may write to."""
    pack.chmod(0o600)
    content = bytearray(pack.read_bytes())
    change(content)
    pack.write_bytes(content)
    pack.chmod(0o400)


def test_what_was_packed_is_served_after_a_start(packed):
    folder, paths = packed
    cache, found = load(folder)
    assert (found["entries"], found["changed"]) == (COUNT, 0)
    assert served(cache, paths) == list(range(COUNT))
    assert cache.statistics.fallbacks == {}
    with open("/proc/self/maps") as maps:
        assert ".pack" not in maps.read(), "a mapping of a file that is cut short ends a process"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.pack")] == [0o400]


def test_batches_are_read_from_packs_and_are_joined_on_the_host(tmp_path, saved):
    """Whole entries, and a tensor that others lie in front of; some of them in memory."""
    for kind, wrap in (
        ("plain", lambda latent: latent),
        ("dict", lambda latent: {"mask": latent[:1].clone(), "latents": latent}),
    ):
        latents = [torch.randn(4, 8, 8) for _ in range(6)]
        paths = [saved(wrap(latent), f"{kind}/{number}.pt") for number, latent in enumerate(latents)]
        cache, _ = load(packed_at(tmp_path / kind / "packs", *paths[:4]).folder)
        Filler(cache).fill(paths[4:])
        entries = cache.find_all(paths)
        assert [entry.address is None for entry in entries] == [True] * 4 + [False] * 2
        leaves = [entry.layout.single or entry.layout.named["latents"] for entry in entries]
        assert torch.equal(assemble(entries, leaves, BufferPool()), torch.stack(latents))
        assert torch.equal(DeviceDelivery(copier=None)(entries, leaves), torch.stack(latents))


def test_entries_whose_source_changed_or_vanished_are_not_served(packed):
    folder, paths = packed
    torch.save(value(9), paths[0])
    os.remove(paths[1])
    cache, found = load(folder)
    assert (found["entries"], found["changed"]) == (COUNT - 2, 2)
    assert served(cache, paths) == [2, 3, 4]


def test_nothing_new_writes_nothing_and_something_new_is_added(packed, saved):
    folder, paths = packed
    assert PackFolder(folder).save(filled(*paths)) == 0
    more = saved(value(1), "src/more.pt")
    assert PackFolder(folder).save(filled(*paths, more)) > 0
    assert len(list(folder.glob("*.pack"))) == 2
    cache, found = load(folder)
    assert found["entries"] == COUNT + 1
    assert torch.equal(cache.get(more)["latents"], value(1)["latents"])


def test_what_is_alive_survives_where_most_is_dead(packed, saved):
    """Whether this run has it in memory or not: no room for an entry is no reason to lose it."""
    folder, paths = packed
    for path in paths[2:]:
        torch.save(value(paths.index(path)), path)
    assert PackFolder(folder).save(filled(*paths[2:4])) > 0
    assert [path.name for path in folder.glob("*.pack")] == ["00000002.pack"]
    cache, found = load(folder)
    assert (found["entries"], found["changed"]) == (COUNT - 1, 0)
    assert served(cache, paths) == [0, 1, 2, 3]


def test_a_flipped_byte_anywhere_is_never_served(packed):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    original = pack.read_bytes()
    for position in [0, 9, 50, 70, 4097, 4200, 5000, len(original) // 2, len(original) - 100, len(original) - 1]:
        overwrite(pack, lambda content, at=position: content.__setitem__(at, content[at] ^ 0x40))
        cache, _ = load(folder)
        served(cache, paths)
        pack.chmod(0o600)
        pack.write_bytes(original)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_disk_leaves_the_old_state(packed, monkeypatch, caplog, number):
    folder, paths = packed
    torch.save(value(2), paths[0])
    cache, before = filled(paths[0]), sorted(os.listdir(folder))

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SegmentWriter, "finish", full)
    assert PackFolder(folder).save(cache) == 0
    assert "no pack written" in caplog.text
    assert sorted(os.listdir(folder)) == sorted({*before, ".lock"})


def test_another_job_at_the_same_folder_is_left_alone(packed):
    folder, paths = packed
    torch.save(value(2), paths[0])
    cache = filled(paths[0])
    with PackPlace.open(folder) as place, place.locked() as ours:
        assert ours
        assert PackFolder(folder).save(cache) == 0
    assert PackFolder(folder).save(cache) > 0


def test_several_leaders_on_one_folder_write_one_copy(packed, saved):
    """All of them start before any has written: nodes on a shared output folder, or two jobs."""
    folder, paths = packed
    new, more = saved(value(1), "src/new.pt"), saved(value(0), "src/more.pt")
    leaders = [PackFolder(folder) for _ in range(3)]
    for packs in leaders:
        packs.open_all()
    assert leaders[0].save(filled(*paths, new)) > 0
    assert leaders[1].save(filled(*paths, new)) == 0
    assert leaders[2].save(filled(*paths, new, more)) > 0
    assert [len(pack) for pack in PackFolder(folder).open_all()] == [COUNT, 1, 1]


@pytest.fixture
def into_one(monkeypatch):
    """As if most of the packs were dead."""
    monkeypatch.setattr("simpletuner_gh200.held.packs.MOSTLY_DEAD", -1.0)


@pytest.mark.parametrize("in_memory", [True, False], ids=["held too", "nowhere else"])
def test_what_turns_out_damaged_while_packs_are_made_into_one_comes_from_memory_or_goes(packed, in_memory, into_one):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    packs = PackFolder(folder)
    cache = filled(*paths[3:4]) if in_memory else filled()
    at = pack.read_bytes().index(value(3)["latents"].numpy().tobytes()[:4096]) + 8
    overwrite(pack, lambda content: content.__setitem__(at, content[at] ^ 1))
    cache.damaged |= {paths[3]} if in_memory else set()
    assert packs.save(cache) > 0
    again, found = load(folder)
    assert found["entries"] == (COUNT if in_memory else COUNT - 1)
    assert served(again, paths) == ([0, 1, 2, 3, 4] if in_memory else [0, 1, 2, 4])


def test_a_damaged_entry_is_counted_and_packed_anew_and_its_bytes_are_dead(packed):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    at = pack.read_bytes().index(value(2)["latents"].numpy().tobytes()[:4096]) + 8
    overwrite(pack, lambda content: content.__setitem__(at, content[at] ^ 1))
    cache, _ = load(folder)
    assert served(cache, paths) == [0, 1, 3, 4]
    assert (cache.damaged, cache.statistics.fallbacks) == ({paths[2]}, {DAMAGED: 1})
    Filler(cache).fill(paths)
    assert served(cache, paths) == list(range(COUNT))
    assert PackFolder(folder).save(cache) > 0
    again, _ = load(folder)
    assert served(again, paths) == list(range(COUNT))
    assert again.statistics.fallbacks == {}


@pytest.mark.parametrize("harm", ["truncate", "overwrite", "remove"])
def test_a_run_survives_what_is_done_to_its_packs(packed, harm):
    """In a child: what is wrong here would end it by a signal. An entry that was served before is no exception."""
    folder, paths = packed
    (pack,) = folder.glob("*.pack")

    def work():
        cache, _ = load(folder)
        entries = cache.find_all(paths)
        size = pack.stat().st_size
        pack.chmod(0o600)
        if harm == "remove":
            pack.unlink()
            return all((cache.get(path)["latents"].numpy() == number).all() for number, path in enumerate(paths))
        with pack.open("r+b") as file:
            file.truncate(0)
            file.write(b"x" * (size if harm == "overwrite" else 0))
        with pytest.raises(DamagedEntry):
            entries[2].copy_into(BufferPool().get(entries[2].length), 0)
        assert all(cache.get(path) is MISSING for path in paths)
        Filler(cache).fill(paths)
        return all(cache.get(path) is not MISSING for path in paths)

    assert in_child(work)


def test_an_index_that_comes_in_pieces_is_whole(packed, monkeypatch):
    """The kernel gives 2 GiB at a time; here it gives less."""
    folder, paths = packed
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: read(fd, min(length, 100), at))
    (pack,) = PackFolder(folder).open_all()
    assert sorted(map(pack.path, range(COUNT))) == sorted(paths)


@pytest.mark.parametrize("change", [-1, 1], ids=["older", "newer"])
def test_packs_of_an_older_version_go_once_there_are_new_ones_and_those_of_a_newer_stay(packed, change):
    folder, paths = packed
    (pack,) = folder.glob("*.pack")
    pack.chmod(0o600)
    pack.write_bytes(MAGIC + struct.pack("<II", SCHEMA + change, 0) + bytes(HEADER_SIZE))
    packs = PackFolder(folder)
    assert packs.open_all() == [] and "version" in packs.notes[0]
    assert packs.save(filled(*paths)) > 0
    assert pack.exists() == (change > 0)
    assert load(folder)[1]["entries"] == COUNT


def test_names_stay_inside_the_folder(tmp_path):
    assert folder_for(tmp_path, "../../etc", "/x").parent == tmp_path
    assert folder_for(tmp_path, "a", "/x") != folder_for(tmp_path, "a", "/y")


# -- whoever writes may be killed, or told to stop, at any moment --------------------------------------------------


def die_at(step):
    """In a forked child: run the writer's steps until the ``step``-th."""
    done = 0

    def mortal(function):
        def counted(*args, **options):
            nonlocal done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    os.fsync = lambda fd: None  # a process that dies takes no page cache with it
    SegmentWriter.write = mortal(SegmentWriter.write)
    for name in ("replace", "fchmod", "unlink", "ftruncate"):
        setattr(os, name, mortal(getattr(os, name)))


def killed(step, folder, cache):
    """The exit status of a writer that dies at its ``step``-th step."""
    child = os.fork()
    if child == 0:
        die_at(step)
        PackFolder(folder).save(cache)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_kill_9_at_any_step_leaves_the_old_state_or_the_new(packed):
    """The pack holds 0..4, two of them outdated; a writer that adds the new two dies at each of its steps in turn."""
    folder, paths = packed
    torch.save(value(0) | {"note": "new 0"}, paths[0])
    torch.save(value(1) | {"note": "new 1"}, paths[1])
    source, states = filled(*paths), []
    for step in range(1, 30):
        status = killed(step, folder, source)
        cache = load(folder)[0]
        notes = [cache.get(path)["note"] if cache.find(path) else None for path in paths]
        assert notes[2:] == ["entry 2", "entry 3", "entry 4"], step
        assert notes[:2] in ([None, None], ["new 0", "new 1"]), step
        states.append(notes[0])
        if status == 0:
            break
    assert status == 0 and len(states) > 8
    assert states[0] is None, "it died before anything was written"
    assert states[-1] == "new 0", "it ended before its turn to die came"
    assert not list(folder.glob(".*.tmp")), "what the dead left is swept"


def test_kill_9_while_packs_are_made_into_one_loses_nothing(packed, saved, into_one):
    """Two packs, of which one entry is twice; the writer dies at each of its steps, the removals included."""
    folder, paths = packed
    more = saved(value(2), "src/more.pt")
    assert PackFolder(folder).save(filled(more)) > 0
    for step in range(1, 40):
        status = killed(step, folder, filled())
        cache, found = load(folder)
        assert len(cache.shelf) == COUNT + 1 and found["changed"] == 0, step
        assert served(cache, paths) == list(range(COUNT))
        cache.close()
        if status == 0:
            break
    assert status == 0, "the last one came to its end"
    assert step > 10, "there were that many steps to die at"
    assert len(list(folder.glob("*.pack"))) == 1


@pytest.mark.parametrize("written", [0, 2])
def test_packing_stops_at_the_next_entry_and_leaves_what_was_there(packed, saved, written, monkeypatch):
    """A failed run, or an interrupted one: nobody waits for whole packs."""
    folder, paths = packed
    cache = filled(*(saved(value(number), f"src/more-{number}.pt") for number in range(4)))
    added: list[str] = []
    original = SegmentWriter.put
    monkeypatch.setattr(
        SegmentWriter, "put", lambda self, key, *rest, **named: (added.append(key), original(self, key, *rest, **named))
    )
    before = sorted(path.name for path in folder.iterdir())
    asked: list[bool] = []

    def stop():
        asked.append(True)
        return len(added) >= written and len(asked) > 1

    assert PackFolder(folder).save(cache, stop=stop) == 0
    assert len(added) == written
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        name for name in before if name != ".lock"
    ]
    again, found = load(folder)
    assert found["entries"] == COUNT
    assert served(again, paths) == list(range(COUNT))


def test_a_new_file_that_is_not_ours_afterwards_is_refused(packed, saved, monkeypatch):
    """Root on a file system that maps root to nobody."""
    folder, _ = packed
    cache, ours = filled(saved(value(1), "src/more.pt")), pack_place.is_ours
    monkeypatch.setattr(pack_place, "is_ours", lambda found: stat.S_ISDIR(found.st_mode) and ours(found))
    with pytest.raises(Exception, match="not ours afterwards"):
        PackFolder(folder).save(cache)
    assert not list(Path(folder).glob(".*.tmp"))
