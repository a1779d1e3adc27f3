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

from simpletuner_gh200.held import saved
from simpletuner_gh200.held.drain import carry_out, drain
from simpletuner_gh200.held.saved import DRAINER, OWNER, MemoryFolder, Order, place_for, settle
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
    drain(folder.path / NAME, output / NAME, folder.draft(order))
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
    eventually(lambda: folder.told() is not None)
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
    eventually(lambda: folder.told() is not None)
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


def test_a_disk_that_refuses_once_in_a_while_and_gets_further_is_not_given_up(memory, output, monkeypatch):
    """Patience is with a disk that takes nothing more: a large checkpoint may need longer than that."""
    folder = MemoryFolder.make(memory)
    filled(folder)
    tried = []

    def drain_a_little(source, target, draft, *given):
        draft.mkdir(exist_ok=True)
        tried.append(draft)
        (draft / f"file-{min(len(tried), 4)}").write_bytes(b"some")
        time.sleep(0.3)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("simpletuner_gh200.held.drain.drain", drain_a_little)
    assert carry_out(folder, order_to(output, patience=0.2)).given_up
    assert len(tried) == 5, "four times it got further"
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


def test_drafts_that_nobody_goes_on_with_are_cleared(memory, output):
    folder = MemoryFolder.make(memory)
    ours = folder.draft(order_to(output))
    others = ours.with_name(ours.name.replace(os.uname().nodename, "another-node"))
    for draft in (ours, ours.with_name(f"{ours.name}.old"), others):
        (draft / "ema").mkdir(parents=True)
    (output / NAME).mkdir()
    settle(output, print)
    assert len(list(output.iterdir())) == 4, "its owner lives, and the other node's may"
    long_ago = time.time() - 7200
    for path in (others, others / "ema"):
        os.utime(path, (long_ago, long_ago))
    folder.remove()
    settle(output, print)
    assert [path.name for path in output.iterdir()] == [NAME]


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
    assert folder.told().given_up and "gone from memory" in folder.told().failing
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
