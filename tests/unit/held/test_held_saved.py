"""A checkpoint on its way from memory to the disk, by the real process: killed, refused, left behind by its owner."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simpletuner_gh200.held import drain as drain_module
from simpletuner_gh200.held import saved, settling
from simpletuner_gh200.held.drain import carry_out, drain
from simpletuner_gh200.held.saved import DRAINER, OWNER, MemoryFolder, Order, beside, claim, place_for
from simpletuner_gh200.held.settling import settle
from tests.chaos.commands import without_roots_rights
from tests.chaos.test_chaos_limits import small_disk

NAME = "checkpoint-7"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder stands for the memory file system, so that no other run's memory is touched."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(saved, "memory_file_systems", lambda: [(place, 1 << 40)])
    return place


@pytest.fixture
def output(tmp_path):
    place = tmp_path / "output"
    place.mkdir()
    return place


def filled(folder, name=NAME):
    """As a checkpoint: some files, one larger than what is copied at once, one in a folder, an empty one."""
    for path, content in {
        "model.safetensors": os.urandom(9 << 20) + b"end",
        "ema/ema_model.pt": os.urandom(70000),
        "random_states_0.pkl": os.urandom(13),
        ".guard": b"",
    }.items():
        (folder.path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name / path).write_bytes(content)
    (folder.path / name / "model.safetensors").chmod(0o640)
    return contents(folder.path / name)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in folder.rglob("*")
        if path.is_file()
    }


def order_to(output, **options):
    return Order(NAME, str(output / NAME), saved_at=0.0, **options)


def abandoned(memory, output, **options):
    """As a rank that was killed leaves it: saved, whole, and nobody's. A process makes the folder, and ends."""
    code = "import sys; from pathlib import Path; from simpletuner_gh200.held.saved import MemoryFolder as F;"
    code += "print(F.make(Path(sys.argv[1])).path)"
    made = subprocess.run([sys.executable, "-c", code, memory], capture_output=True, text=True, check=True)
    folder = MemoryFolder(Path(made.stdout.strip()))
    expected = filled(folder)
    folder.give(order_to(output, **options))
    return folder, expected


def eventually(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_disk_gets_every_byte_under_its_name_and_the_memory_is_free(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    folder.give(order_to(output))
    assert folder.start_drainer().wait(60) == 0
    assert contents(output / NAME) == expected
    assert [path.name for path in output.iterdir()] == [NAME], "no draft is left"
    assert folder.order() is None
    assert folder.told().bytes == sum(len(content) for content, _mode in expected.values())
    assert sorted(path.name for path in folder.path.iterdir()) == [DRAINER, OWNER, "told.json"]
    folder.remove()
    assert list(memory.iterdir()) == []


STAGES = {
    "at once": lambda output: True,
    "with a draft": lambda output: list(output.glob(".gh200-draining-*")),
    "in mid-file": lambda output: any(path.stat().st_size for path in output.glob(".gh200-draining-*/*.safetensors")),
    "with a file whole": lambda output: list(output.glob(".gh200-draining-*/ema/*.pt")),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_drainer_that_is_killed_leaves_nothing_that_looks_whole_and_the_next_one_goes_on(memory, output, stage):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    folder.give(order_to(output, rate=20e6))
    drainer = folder.start_drainer()
    eventually(lambda: STAGES[stage](output))
    drainer.kill()
    drainer.wait()
    assert not (output / NAME).exists()
    assert contents(folder.path / NAME) == expected, "the memory still has all of it"
    folder.start_drainer().wait(60)
    assert contents(output / NAME) == expected
    assert [path.name for path in output.iterdir()] == [NAME]
    folder.remove()


def test_one_killed_between_the_rename_and_its_last_word_copies_nothing_again(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    order = order_to(output)
    folder.give(order)
    drain(folder, folder.order())
    inode = (output / NAME / "model.safetensors").stat().st_ino
    folder.start_drainer().wait(60)
    assert folder.order() is None
    assert contents(output / NAME) == expected
    assert (output / NAME / "model.safetensors").stat().st_ino == inode
    folder.remove()


def test_one_that_was_saved_anew_takes_the_place_of_the_older_one(memory, output):
    folder = MemoryFolder.make(memory)
    (output / NAME).mkdir()
    (output / NAME / "model.safetensors").write_bytes(b"older")
    expected = filled(folder)
    folder.give(order_to(output))
    folder.start_drainer().wait(60)
    assert contents(output / NAME) == expected
    assert [path.name for path in output.iterdir()] == [NAME]
    folder.remove()


def test_no_signal_of_a_run_reaches_the_drainer_and_only_one_works_at_a_time(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    folder.give(order_to(output, rate=20e6))
    drainer = folder.start_drainer()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        drainer.send_signal(number)
    eventually(lambda: folder.locked(DRAINER))
    assert folder.start_drainer().wait(60) == 0, "the second one has nothing to do"
    assert folder.order() is not None
    assert drainer.wait(60) == 0
    assert contents(output / NAME) == expected
    folder.remove()


def test_a_disk_that_is_gone_for_a_while_is_tried_again(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    away = output.rename(output.with_name("away"))
    folder.give(order_to(output, patience=60.0))
    drainer = folder.start_drainer()
    eventually(lambda: folder.told() is not None and folder.told().failing)
    assert "No such file" in folder.told().failing and not folder.told().given_up
    away.rename(output)
    assert drainer.wait(60) == 0
    assert contents(output / NAME) == expected
    folder.remove()


def test_a_disk_that_is_read_only_for_a_while_is_tried_again(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    folder.give(order_to(output, patience=60.0))
    output.chmod(0o555)
    command = [sys.executable, "-m", "simpletuner_gh200.held.drain", folder.path]
    drainer = subprocess.Popen(command, preexec_fn=without_roots_rights)
    eventually(lambda: folder.told() is not None and folder.told().failing)
    assert "Permission denied" in folder.told().failing
    output.chmod(0o755)
    assert drainer.wait(60) == 0
    assert contents(output / NAME) == expected
    folder.remove()


FULL_DISK = """
import json, sys
from pathlib import Path
from simpletuner_gh200.held.drain import carry_out
from simpletuner_gh200.held.saved import MemoryFolder, Order
folder, output = MemoryFolder(Path(sys.argv[1])), Path(sys.argv[2])
(output / "checkpoint-6").mkdir()
told = carry_out(folder, Order("checkpoint-7", str(output / "checkpoint-7"), 0.0, patience=0.5))
print(json.dumps([told.given_up, told.failing, [path.name for path in output.iterdir()]]))
"""


def test_a_full_disk_keeps_what_is_there_and_is_given_up_when_patience_ends(memory, output):
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    code = [sys.executable, "-c", FULL_DISK, folder.path, output]
    ended = subprocess.run([*small_disk(output, 4096), *code], capture_output=True, text=True, check=True)
    given_up, failing, left = json.loads(ended.stdout)
    assert given_up and "No space left on device" in failing
    assert left == ["checkpoint-6"], "no draft takes the last room"
    assert contents(folder.path / NAME) == expected
    folder.remove()


FULL_MEMORY = """
import errno, sys
from pathlib import Path
from simpletuner_gh200.held import drain
from simpletuner_gh200.held.saved import MemoryFolder, Order
memory, output = map(Path, sys.argv[1:])
folder = MemoryFolder.make(memory)
for name in ("checkpoint-7", "checkpoint-8"):
    (folder.path / name).mkdir()
    (folder.path / name / "model.bin").write_bytes(name.encode() * 30000)
    try:
        with open(memory / "others", "wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
    except OSError as full:
        assert full.errno == errno.ENOSPC
    folder.give(Order(name, str(output / name), 0.0))
    assert drain.main([str(folder.path)]) == 0
    assert folder.order() is None and not folder.told().given_up
    (memory / "others").unlink()
"""


def test_a_memory_that_others_have_filled_still_gets_its_checkpoints_to_the_disk(memory, output):
    code = [sys.executable, "-c", FULL_MEMORY, memory, output]
    ended = subprocess.run([*small_disk(memory, 2048), *code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = {path.name: (path / "model.bin").read_text() for path in output.iterdir()}
    assert found == {name: name * 30000 for name in ("checkpoint-7", "checkpoint-8")}


def test_a_disk_that_refuses_once_in_a_while_and_gets_further_is_not_given_up(memory, output, monkeypatch):
    """Patience is with a disk that takes nothing more: a large checkpoint may need longer than that."""
    folder = MemoryFolder.make(memory)
    filled(folder)
    tried = []

    def drain_a_little(folder, order, **_begun):
        draft = folder.draft(order)
        draft.mkdir(exist_ok=True)
        tried.append(draft)
        (draft / f"file-{min(len(tried), 4)}").write_bytes(b"some")
        time.sleep(0.3)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("simpletuner_gh200.held.drain.drain", drain_a_little)
    assert carry_out(folder, order_to(output, patience=0.2)).given_up
    assert len(tried) == 5, "four times it got further"
    folder.remove()


@pytest.mark.parametrize("disclaimed", [False, True])
def test_a_draft_that_somebody_cleared_meanwhile_is_never_given_the_name(memory, output, monkeypatch, disclaimed):
    """By whoever took its writer for dead, which only stood still: clearing stops at what was written just then."""
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    claim(output, folder.run)
    synced, cleared = drain_module._synced, []

    def clear_then_sync(place):
        if not cleared:
            cleared.append((folder.draft(order) / "model.safetensors").unlink())
            if disclaimed:
                saved.disclaim(output, folder.run)
        synced(place)

    monkeypatch.setattr(drain_module, "_synced", clear_then_sync)
    order = order_to(output, run=folder.run, disk=output.stat().st_dev, patience=0.3)
    told = carry_out(folder, order)
    assert told.given_up == disclaimed and (not disclaimed or "no longer the folder of the run" in told.failing)
    assert contents(output / NAME) == ({} if disclaimed else expected)
    folder.remove()


def test_what_is_given_up_leaves_no_memory_and_says_why(memory, output):
    output.rmdir()
    folder = MemoryFolder.make(memory)
    filled(folder)
    folder.give(order_to(output, patience=0.2))
    assert folder.start_drainer().wait(60) == 1
    assert folder.told().given_up and folder.order() is None and not (folder.path / NAME).exists()
    folder.remove()


def test_what_differs_on_the_disk_is_never_given_the_name(memory, output, monkeypatch):
    """A disk that reads other bytes than were written to it: emulated by a copy that is cut off."""
    folder = MemoryFolder.make(memory)
    filled(folder)
    monkeypatch.setattr("simpletuner_gh200.held.drain._pour", lambda reader, writer, rest: os.write(writer, b"other"))
    told = carry_out(folder, order_to(output, patience=0.0))
    assert told.given_up and "differs from what was written" in told.failing
    assert list(output.iterdir()) == []
    folder.remove()


# -- those who come later ----------------------------------------------------------------------------------


def test_what_a_dead_rank_left_is_on_the_disk_before_anybody_looks(memory, output):
    _folder, expected = abandoned(memory, output)
    said = []
    assert settle(output, said.append) == []
    assert contents(output / NAME) == expected
    assert said == [f"{output / NAME}: it is in memory alone, and is being written"]
    assert list(memory.iterdir()) == []


def test_a_drainer_whose_rank_has_died_clears_the_memory_itself(memory, output):
    folder, expected = abandoned(memory, output)
    assert folder.start_drainer().wait(60) == 0
    assert contents(output / NAME) == expected
    assert list(memory.iterdir()) == []


def test_a_half_saved_one_is_cleared_and_never_gets_to_the_disk(memory, output):
    folder, _expected = abandoned(memory, output)
    (folder.path / "order.json").unlink()
    assert settle(output, print) == []
    assert list(memory.iterdir()) == list(output.iterdir()) == []


def test_a_living_run_is_left_alone_and_others_folders_are_not_waited_for(memory, output, tmp_path):
    living = MemoryFolder.make(memory)
    filled(living)
    living.give(order_to(output))
    elsewhere, expected = abandoned(memory, tmp_path / "elsewhere", rate=10e6)
    (tmp_path / "elsewhere").mkdir()
    said = []
    assert settle(output, said.append) == [] and said == []
    assert living.order() is not None and living.path.is_dir()
    eventually(lambda: not elsewhere.path.exists())
    assert contents(tmp_path / "elsewhere" / NAME) == expected
    living.remove()


def test_somebody_in_a_hurry_does_not_wait_and_is_told_so(memory, output):
    folder, expected = abandoned(memory, output, rate=10e6)
    assert settle(output, print, until=0.0) == [f"{output / NAME} is not on disk yet; that goes on in the background"]
    eventually(lambda: not folder.path.exists())
    assert contents(output / NAME) == expected


def test_what_is_given_up_is_said_and_leaves_no_memory(memory, output):
    output.rmdir()
    _folder, _expected = abandoned(memory, output, patience=0.2)
    said = []
    (lost,) = settle(output, said.append)
    assert lost.startswith(f"{output / NAME} was given up: ") and "No such file" in lost
    assert list(memory.iterdir()) == []


# -- memory that can't be seen from here --------------------------------------------------------------------


@pytest.fixture
def another_memory(tmp_path, memory, monkeypatch):
    """A container of this name with a memory file system of its own; which of them is visible is to be chosen."""
    place = tmp_path / "another"
    place.mkdir()
    identity = saved.memory_id

    def told_apart(path, *root):
        return identity(path, *root) + ("a" if place in (path, *path.parents) else "")

    monkeypatch.setattr(saved, "memory_id", told_apart)
    return place


def visible(monkeypatch, *places):
    monkeypatch.setattr(saved, "memory_file_systems", lambda: [(place, 1 << 40) for place in places])


def test_two_memories_of_one_name_are_told_apart_and_so_are_two_starts_of_a_node(tmp_path):
    kernel = tmp_path / "proc/sys/kernel/random/boot_id"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("0d2f63d4-0000-4000-8000-000000000000\n")
    shared, other, again = (saved.memory_id(Path(place)) for place in ("/dev/shm", tmp_path, "/dev/shm/."))
    assert shared == again != other
    assert saved.memory_id(Path("/dev/shm"), tmp_path) != shared, "the kernel was started anew"


def test_drafts_of_this_memory_that_nobody_goes_on_with_are_cleared(memory, output):
    folder = MemoryFolder.make(memory)
    ours = folder.draft(order_to(output))
    for draft in (ours, beside(ours, "old")):
        draft.mkdir()
    beside(ours, "part1").write_text("{}")
    (output / NAME).mkdir()
    assert settle(output, print) == []
    assert len(list(output.iterdir())) == 4, "its owner lives"
    folder.remove()
    (lost,) = settle(output, print)
    assert f"{NAME} was on its way from the memory of {os.uname().nodename}, and its writer is gone" in lost
    assert [path.name for path in output.iterdir()] == [NAME]
    beside(ours, "part1.4711").write_text("{")  # of a list that was not finished
    assert settle(output, print) == []
    assert [path.name for path in output.iterdir()] == [NAME]


def test_a_copy_from_another_memory_is_waited_for_while_it_grows(memory, output, another_memory, monkeypatch):
    visible(monkeypatch, another_memory)
    folder, expected = abandoned(another_memory, output, rate=20e6)
    drainer = folder.start_drainer()
    visible(monkeypatch, memory)
    eventually(lambda: list(output.glob(".gh200-draining-*")))
    said = []
    hurried = settle(output, said.append, until=0.0)
    assert hurried == [f"{NAME} is not on disk yet: it comes from the memory of {os.uname().nodename}"] and said == []
    assert settle(output, said.append) == []
    assert said == [f"{NAME} is being written from the memory of {os.uname().nodename}: waiting for it"]
    assert contents(output / NAME) == expected
    assert drainer.wait(60) == 0


def test_one_that_no_longer_grows_is_left_out_said_so_and_never_comes_late(memory, output, another_memory, monkeypatch):
    """Its node was lost with the job, and comes back when another run has gone on without the checkpoint."""
    monkeypatch.setattr(settling, "QUIET", 0.3)
    visible(monkeypatch, another_memory)
    folder = MemoryFolder.make(another_memory)
    filled(folder)
    claim(output, folder.run)
    folder.give(order_to(output, rate=1e6, disk=output.stat().st_dev))
    drainer = folder.start_drainer()
    eventually(lambda: list(output.glob(".gh200-draining-*/*.safetensors")))
    drainer.kill()
    drainer.wait()
    folder.leave()
    visible(monkeypatch, memory)
    clear, claims = settling._clear, []
    monkeypatch.setattr(settling, "_clear", lambda draft: (claims.append(saved.claimed(output)), clear(draft)))
    (lost,) = settle(output, print)
    assert "and its writer is gone" in lost and claims == [None], "a writer that only stood still can't begin anew"
    assert list(output.glob(".gh200-draining-*")) == []

    (output / NAME).mkdir()
    (output / NAME / "model.safetensors").write_bytes(b"of the run that went on")
    visible(monkeypatch, another_memory)
    (late,) = settle(output, print)
    assert "is no longer the folder of the run that saved it" in late
    assert (output / NAME / "model.safetensors").read_bytes() == b"of the run that went on"
    assert list(another_memory.iterdir()) == []


@pytest.mark.parametrize("by", ["a folder made anew", "the same folder, emptied", "another run's claim"])
def test_what_a_dead_run_left_never_lands_in_a_new_trainings_folder(memory, output, by):
    folder = MemoryFolder.make(memory)
    filled(folder)
    claim(output, folder.run)
    folder.give(order_to(output, disk=output.stat().st_dev))
    folder.leave()
    if by == "another run's claim":
        claim(output, "another")
    else:
        shutil.rmtree(output)
        output.mkdir()
    (lost,) = settle(output, print)
    assert lost == f"{output / NAME} was given up: {output} is no longer the folder of the run that saved it"
    assert list(output.glob("*checkpoint*")) == list(memory.iterdir()) == []


def test_a_disk_that_is_not_mounted_yet_is_waited_for(memory, output):
    """The folder is gone, but so is the disk that it was on."""
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    claim(output, folder.run)
    away = output.rename(output.with_name("away"))
    folder.give(order_to(output, disk=-1))
    folder.leave()
    drainer = folder.start_drainer()
    eventually(lambda: folder.told() is not None and folder.told().failing)
    assert not folder.told().given_up and "No such file" in folder.told().failing
    away.rename(output)
    assert drainer.wait(60) == 0
    assert contents(output / NAME) == expected


# -- several nodes -------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(memory, output):
    """What two nodes have saved of one checkpoint: (folder, order) of each, and what the disk is to have."""
    folders = [MemoryFolder.make(memory), MemoryFolder.make(memory)]
    expected = filled(folders[0])
    (folders[1].path / NAME / "ema").mkdir(parents=True)
    for name in ("random_states_1.pkl", "ema/shard.distcp"):
        (folders[1].path / NAME / name).write_bytes(os.urandom(3 << 20))
    expected |= contents(folders[1].path / NAME)
    (folders[1].path / NAME / "random_states_0.pkl").write_bytes(b"every node writes one, the first one's counts")

    def give(part, **options):
        files = {name: len(content) for name, (content, _mode) in expected.items()}
        own = {
            name: size for name, size in files.items() if (name in ("random_states_1.pkl", "ema/shard.distcp")) == part
        }
        folders[part].give(order_to(output, files=own, part=part, parts=2, run=folders[0].run, **options))
        return folders[part].start_drainer()

    yield folders, give, expected
    for folder in folders:
        folder.remove()


def test_each_node_copies_its_part_and_the_last_one_there_makes_it_whole(nodes, output):
    (first, second), give, expected = nodes
    one = give(0)
    eventually(lambda: list(output.glob(".gh200-draining-*/model.safetensors")))
    assert not (output / NAME).exists(), "the second node's part is not there"
    assert give(1).wait(60) == one.wait(60) == 0
    assert contents(output / NAME) == expected
    assert [path.name for path in output.iterdir()] == [NAME]
    assert first.order() is None and second.order() is None


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("older", [False, True], ids=["the first", "over an older one of its name"])
@pytest.mark.parametrize("stage", ["at once", "in mid-file", "with its part there"])
def test_a_node_whose_drainer_is_killed_goes_on_and_nobody_takes_the_rest_for_whole(nodes, output, part, older, stage):
    folders, give, expected = nodes
    if older:  # of a run that drew the same random numbers
        shutil.copytree(folders[1].path / NAME, output / NAME)
    other = give(1 - part) if part == 1 else None
    drainer = give(part, rate=20e6)
    own = "random_states_1.pkl" if part else "model.safetensors"
    eventually(
        {
            "at once": lambda: True,
            "in mid-file": lambda: list(output.glob(f".gh200-draining-*/{own}")),
            "with its part there": lambda: (
                drainer.poll() is not None
                or all(list(output.glob(f".gh200-draining-*/{name}")) for name in ("model.safetensors", ".guard"))
            ),
        }[stage]
    )
    drainer.kill()
    drainer.wait()
    assert not (output / NAME / "model.safetensors").exists() or stage == "with its part there"
    other = other or give(1 - part)
    if folders[part].order() is not None:
        folders[part].start_drainer().wait(60)
    assert other.wait(60) == 0
    assert contents(output / NAME) == expected
    assert [path.name for path in output.iterdir()] == [NAME]


def test_a_node_that_never_comes_is_named_and_nothing_half_is_left(nodes, output):
    (first, _second), give, _expected = nodes
    assert give(0, patience=0.3).wait(60) == 1
    assert first.told().given_up and "nothing came for 300 ms from node 2 of 2" in first.told().failing
    assert list(output.iterdir()) == []


def test_a_part_stays_in_memory_until_the_checkpoint_has_its_name(nodes, output):
    (_first, second), give, _expected = nodes
    one = give(1, patience=0.5)
    eventually(lambda: list(output.glob("*.part1")))
    assert second.order() is not None and (second.path / NAME).is_dir()
    assert one.wait(60) == 1
    assert "from node 1 of 2" in second.told().failing and not list(output.glob("*.part1"))


def test_the_roomiest_place_is_taken_only_where_the_first_is_too_small():
    systems = [(Path("/dev/shm"), 64), (Path("/run/user/1"), 10), (Path("/mnt"), 900)]
    assert place_for(60, systems) == (Path("/dev/shm"), 64)
    assert place_for(65, systems) == (Path("/mnt"), 900)
    assert place_for(1000, systems) == (Path("/mnt"), 900), "said later, with the number"
    assert place_for(1, []) is None


def test_memory_file_systems_are_those_that_can_be_written_to(tmp_path):
    mounts = tmp_path / "proc/self/mounts"
    mounts.parent.mkdir(parents=True)
    usable = tmp_path / "a ü"
    usable.mkdir()
    shown = str(usable).replace(" ", "\\040")
    mounts.write_text(
        f"tmpfs {shown} tmpfs rw,nosuid 0 0\ntmpfs {tmp_path} tmpfs ro 0 0\n"
        f"/dev/vda {tmp_path} ext4 rw 0 0\ntmpfs {tmp_path}/gone tmpfs rw 0 0\ncgroup /sys/fs tmpfs rw 0 0\n"
    )
    assert [place for place, _room in saved.memory_file_systems(tmp_path)] == [usable]


def test_locks_tell_who_lives_and_not_process_numbers(memory):
    """A number means something else in another container that has the same memory."""
    folder = MemoryFolder.make(memory)
    assert folder.locked(OWNER)
    folder.remove()
    assert list(memory.iterdir()) == []
    assert not folder.locked(OWNER)


def test_one_that_was_left_is_nobodys_though_a_child_of_its_owner_lives(memory):
    """Forked by a data loader, say: it has all that was open then."""
    folder = MemoryFolder.make(memory)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[folder._own]):
        folder.leave()
        assert not folder.locked(OWNER)
    folder.remove()


# -- what memory, links and others may do to it ------------------------------------------------------------


@pytest.mark.parametrize("gone", ["one file", "the folder", "the end of a file"])
def test_what_memory_lost_is_never_taken_for_a_whole_checkpoint(memory, output, gone):
    """By a logout that clears a user's memory files, or by a person who makes room there."""
    folder = MemoryFolder.make(memory)
    filled(folder)
    (output / NAME).mkdir()
    (output / NAME / "model.safetensors").write_bytes(b"older")
    folder.give(order_to(output))
    weights = folder.path / NAME / "model.safetensors"
    {
        "one file": weights.unlink,
        "the folder": lambda: shutil.rmtree(folder.path / NAME),
        "the end of a file": lambda: os.truncate(weights, 5),
    }[gone]()
    assert folder.start_drainer().wait(60) == 1
    assert folder.told().given_up and "is no longer in memory" in folder.told().failing
    assert contents(output / NAME).keys() == {"model.safetensors"}, "the older one is as it was"
    assert [path.name for path in output.iterdir()] == [NAME]
    folder.remove()


def test_a_name_that_can_not_be_given_leaves_the_older_one_in_its_place(memory, output, monkeypatch):
    folder = MemoryFolder.make(memory)
    filled(folder)
    folder.give(order_to(output))
    (output / NAME).mkdir()
    (output / NAME / "model.safetensors").write_bytes(b"older")
    rename = Path.rename

    def refused(path, target):
        if path.name.startswith(".gh200-draining-") and not path.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert carry_out(folder, order_to(output, patience=0.0)).given_up
    assert (output / NAME / "model.safetensors").read_bytes() == b"older"
    assert [path.name for path in output.iterdir()] == [NAME]
    folder.remove()


def test_an_older_one_that_was_moved_for_nothing_comes_back(memory, output):
    """The node went down between the two renames: the memory is gone, the older one has no name."""
    folder = MemoryFolder.make(memory)
    draft = folder.draft(order_to(output))
    folder.remove()
    draft.mkdir()
    older = draft.with_name(f"{draft.name}.old")
    older.mkdir()
    (older / "model.safetensors").write_bytes(b"older")
    settle(output, print)
    assert (output / NAME / "model.safetensors").read_bytes() == b"older"
    assert [path.name for path in output.iterdir()] == [NAME]


@pytest.mark.parametrize("spelt", ["by a link", "with dots"])
def test_one_is_waited_for_however_the_output_folder_is_spelt(memory, output, tmp_path, spelt):
    (tmp_path / "link").symlink_to(output)
    (tmp_path / "other").mkdir()
    given = {"by a link": tmp_path / "link", "with dots": tmp_path / "other" / ".." / "output"}[spelt]
    _folder, expected = abandoned(memory, output, rate=20e6)
    said = []
    assert settle(given, said.append) == [] and len(said) == 1
    assert contents(output / NAME) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_another_user_named_like_ours_is_nobodys(memory, output):
    folder, _expected = abandoned(memory, output)
    os.chown(folder.path, 12345, 12345)
    linked = memory / f"simpletuner-gh200-{os.getuid()}-saved-1-1"
    linked.symlink_to(folder.path)
    assert saved.memory_folders() == []
    assert settle(output, print) == []
    assert folder.path.is_dir() and list(output.iterdir()) == []


def test_a_disk_that_syncs_no_folders_and_keeps_no_modes_is_a_disk(memory, output, monkeypatch):
    """As some network and FUSE file systems are."""
    folder = MemoryFolder.make(memory)
    expected = filled(folder)
    sync = os.fsync

    def of_files(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(fd)

    def refused(*_given, **_more):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", of_files)
    monkeypatch.setattr(os, "chmod", refused)
    monkeypatch.setattr(os, "utime", refused)
    folder.give(order_to(output, patience=0.0))
    assert not carry_out(folder, folder.order()).given_up
    assert {name: content for name, (content, _mode) in contents(output / NAME).items()} == {
        name: content for name, (content, _mode) in expected.items()
    }
    folder.remove()


def test_two_who_ask_at_the_same_time_do_not_take_each_other_for_the_owner(memory, output):
    """Else a start would not wait for the checkpoint that a dead run left, and resume from an older one."""
    folder, _expected = abandoned(memory, output)
    others = subprocess.Popen([sys.executable, "-c", ASKING, folder.path], stdout=subprocess.PIPE)
    assert others.stdout.readline() == b"asking\n"
    assert sum(folder.locked(OWNER) for _ in range(3000)) == 0
    others.kill()
    others.wait()
    others.stdout.close()
    folder.remove()


ASKING = """
import sys
from pathlib import Path
from simpletuner_gh200.held.saved import OWNER, MemoryFolder
print("asking", flush=True)
while True:
    MemoryFolder(Path(sys.argv[1])).locked(OWNER)
"""
