"""Filling that goes on while training runs: nothing waits for it, and nothing is lost when it ends early."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch

from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.service import Caches, Wanted
from simpletuner_gh200.cache.slots import key_of
from simpletuner_gh200.cache.table import DAMAGED, MISSING
from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.memory import background, pace
from simpletuner_gh200.memory.background import BackgroundJob
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.pace import BackgroundPace, background_effort
from simpletuner_gh200.memory.sharing import NodeGroup


def alone() -> NodeGroup:
    return NodeGroup.from_environment("test", {})


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "vae"
    folder.mkdir()
    paths = [str(folder / f"{number}.pt") for number in range(30)]
    for number, path in enumerate(paths):
        torch.save(torch.full((100,), float(number)), path)
    return paths


def opened(tmp_path, **options) -> Caches:
    return Caches([Wanted("vae-x", "vae", str(tmp_path / "vae"))], allowed=None, group=alone(), **options)


@pytest.fixture
def held_up(monkeypatch):
    """The background rests after its first batch until it is told to go on."""
    go_on = threading.Event()
    rest = BackgroundPace.rest

    def waiting(self, size):
        while size and not self.ended and not go_on.wait(0.01):
            continue
        rest(self, size)

    monkeypatch.setattr(BackgroundPace, "rest", waiting)
    monkeypatch.setattr("simpletuner_gh200.cache.batch_fill.MOST_FILES", 4)
    monkeypatch.setattr("simpletuner_gh200.cache.pack_reading.MOST_ENTRIES", 4)
    monkeypatch.setattr(background, "background_effort", lambda cores: pace.Effort(1, 1.0))
    yield go_on
    go_on.set()


def test_fill_returns_before_anything_is_in_and_entries_come_by_themselves(tmp_path, files, held_up):
    caches = opened(tmp_path)
    caches.fill("background")
    table = caches.tables["vae-x"]
    assert not caches.wait_until_filled(0.05)
    assert any(table.find(path) is None for path in files)
    assert caches.report()["vae-x"]["filling"] == "running"
    held_up.set()
    assert caches.wait_until_filled(20)
    assert all(float(table.get(path)[0]) == number for number, path in enumerate(files))
    assert caches.report()["vae-x"]["filling"] == "done"
    caches.close()


def test_what_is_asked_for_first_comes_from_the_pack_at_once(tmp_path, files, held_up):
    held_up.set()
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill("background")
    assert first.wait_until_filled(20), "and its packs are written"
    first.close()
    held_up.clear()
    second = opened(tmp_path, packs=tmp_path / "packs")
    second.fill("background")
    table = second.tables["vae-x"]
    assert [float(table.get(path)[0]) for path in reversed(files)] == [float(n) for n in reversed(range(30))]
    assert table.statistics.misses.value == 0
    assert second.report()["vae-x"]["filling"] == "running"
    second.close()
    assert second.report()["vae-x"]["filling"] == "stopped"


def test_what_is_left_for_later_begins_when_it_is_told_to(tmp_path, files):
    caches = opened(tmp_path)
    caches.fill("background", later=True)
    assert caches.report()["vae-x"]["filling"] == "waiting"
    assert caches.tables["vae-x"].control.held == 0
    caches.go_on()
    caches.go_on()
    assert caches.wait_until_filled(20)
    assert caches.report()["vae-x"]["entries"] == len(files)
    caches.close()


def test_a_run_that_ends_before_its_first_step_begins_nothing(tmp_path, files):
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("background", later=True)
    caches.save()
    caches.go_on()
    assert caches.report()["vae-x"]["filling"] == "stopped"
    assert caches.tables["vae-x"].control.held == 0
    caches.close()


def test_lazy_takes_only_what_is_asked_for(tmp_path, files):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("lazy")
    table = caches.tables["vae-x"]
    assert table.control.held == 0
    assert float(table.get(files[7])[0]) == 7.0
    assert caches.report()["vae-x"]["entries"] == 1
    caches.close()


def test_a_pack_whose_file_changed_is_not_believed_at_first_use(tmp_path, files):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    torch.save(torch.full((100,), 99.0), files[3])
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("lazy")
    assert caches.tables["vae-x"].get(files[3]) is MISSING
    assert float(caches.tables["vae-x"].get(files[4])[0]) == 4.0
    caches.close()


def test_packs_of_another_configuration_are_not_served_at_first_use(tmp_path, files):
    """The very files, encoded for another VAE's run: the index of packs is asked before they are loaded."""
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    wanted = Wanted("vae-x", "vae", str(tmp_path / "vae"), made_by="another VAE")
    caches = Caches([wanted], allowed=None, group=alone(), packs=tmp_path / "packs")
    caches.fill("lazy")
    assert caches.tables["vae-x"].get(files[3]) is MISSING
    caches.close()


@pytest.mark.parametrize("copies", [False, True], ids=["read in packs", "copied"])
def test_a_damaged_payload_is_found_at_first_use_or_when_it_is_copied_and_packed_anew(tmp_path, files, copies):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    [pack] = (tmp_path / "packs").rglob("*.pack")
    pack.chmod(0o600)
    content = bytearray(pack.read_bytes())
    at = content.index(torch.full((100,), 5.0).numpy().tobytes())
    content[at] ^= 1
    pack.write_bytes(content)
    pack.chmod(0o400)
    lazy = opened(tmp_path, packs=tmp_path / "packs")
    lazy.fill("lazy")
    assert lazy.tables["vae-x"].get(files[5]) is MISSING
    lazy.close()
    caches = opened(tmp_path, packs=tmp_path / "packs", copies=copies)
    caches.fill("background")
    assert caches.wait_until_filled(20)
    table = caches.tables["vae-x"]
    assert table.damaged == ({files[5]} if copies else set())
    assert table.get(files[5]) is MISSING
    assert take_in(table, files[5])
    assert all(float(table.get(path)[0]) == number for number, path in enumerate(files))
    assert caches.report()["vae-x"]["packs"]["damaged"] == 1
    assert table.statistics.fallbacks == {DAMAGED: 1}
    caches.save()
    caches.close()
    again = opened(tmp_path, packs=tmp_path / "packs")
    again.fill()
    assert all(float(again.tables["vae-x"].get(path)[0]) == number for number, path in enumerate(files))
    assert again.tables["vae-x"].statistics.fallbacks == {}
    again.close()


@pytest.mark.parametrize("when", ["start", "background"])
def test_what_a_device_copies_from_is_copied_out_of_packs_behind_the_run(tmp_path, files, when):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    for copies in (False, True):
        caches = opened(tmp_path, packs=tmp_path / "packs", copies=copies)
        caches.fill(when, later=True)
        table = caches.tables["vae-x"]
        assert float(table.get(files[3])[0]) == 3
        assert (table.find(files[3]).address is not None) == copies, "what is asked for is copied at once"
        caches.go_on()
        assert caches.wait_until_filled(20)
        assert [table.find(path, fetch=False).address is not None for path in files] == [copies] * len(files)
        assert (table.control.held > 0) == copies
        assert all(float(table.get(path)[0]) == number for number, path in enumerate(files))
        assert caches.report()["vae-x"]["filling"] == "done"
        caches.close()


def test_each_rank_copies_its_part_out_of_packs(tmp_path, files, monkeypatch):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    caches = opened(tmp_path, packs=tmp_path / "packs", copies=True)
    caches.fill("start", later=True)
    monkeypatch.setattr(type(caches.copies), "position", lambda _self, _rank: (1, 2))
    caches.go_on()
    assert caches.wait_until_filled(20)
    copied = [path for path in files if (found := caches.tables["vae-x"].find(path, fetch=False)) and found.address]
    assert copied == [path for path in files if key_of(path).low % 2 == 1]
    caches.close()


def test_a_pack_that_another_rank_lists_is_the_one_that_is_open_here(tmp_path, files):
    """With one index for both, and served on when that rank is gone."""
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill()
    table = caches.tables["vae-x"]
    (listed,) = (row for row in table.control.rows() if row.is_pack)
    gone = replace(listed, pid=2**22 + 1)  # beyond any process
    assert table._segments._reach(gone) is table._segments.get(listed.number)
    assert table._segments._reach(replace(gone, device=gone.device + 1)) is None
    caches.close()


def test_what_has_no_room_in_slabs_is_read_in_packs(tmp_path, files):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    caches = opened(tmp_path, packs=tmp_path / "packs", copies=True)
    table = caches.tables["vae-x"]
    caches.fill(later=True)
    table.allowed = 1000  # the disk's sizes promised less than memory takes
    caches.go_on()
    assert caches.wait_until_filled(20)
    where = [table.find(path).address is not None for path in files]
    assert 0 < sum(where) < len(files)
    assert all(float(table.get(path)[0]) == number for number, path in enumerate(files))
    caches.close()


def test_closing_stops_it_and_what_came_so_far_goes_into_packs(tmp_path, files, held_up):
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("background")
    table = caches.tables["vae-x"]
    deadline = time.monotonic() + 20
    while table.control.held == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    caches.save()
    taken = caches.report()["vae-x"]["entries"]
    caches.close()
    assert 0 < taken < 30
    again = opened(tmp_path, packs=tmp_path / "packs")
    again.fill()
    assert again.loaded["vae-x"].entries == taken
    again.close()


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CacheError("no more segments"), "no more segments"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread"),
    ],
)
def test_what_goes_wrong_in_the_background_is_said_and_ends_nothing(caplog, failure, said):
    def work(_pace, _effort):
        raise failure

    job = BackgroundJob(work, name="test")
    with caplog.at_level(logging.WARNING):
        job.start()
        assert job.wait(20)
    assert job.state == "failed"
    assert said in caplog.text


NEVER_ENDS = """
    import logging, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    from simpletuner_gh200.launch import leave
    from simpletuner_gh200.memory import background
    logging.basicConfig(level=logging.WARNING)
    background.SILENCE_SECONDS = 0.3
    working = threading.Event()
    def work(pace, effort):
        with ThreadPoolExecutor(1) as pool:  # as filling does, in whose reading thread a file system hangs
            pool.submit(lambda: (working.set(), threading.Event().wait())).result()
    job = background.BackgroundJob(work, name="gh200-fill")
    job.start()
    working.wait()
    print(job.stop(), job.stop(), job.state)
    leave(3)
"""


def test_a_job_that_never_ends_is_said_and_left_behind_and_the_process_ends():
    """In a process of its own, which hangs without it."""
    code = textwrap.dedent(NEVER_ENDS)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (3, "False False left behind\n"), ended.stderr
    assert "gh200-fill was told to end, and nothing was heard of it" in ended.stderr
    assert ended.stderr.count("left behind") == 1


def test_a_job_that_goes_on_is_waited_for(monkeypatch):
    """However long it has to write: it is silence that is not waited for."""
    monkeypatch.setattr(background, "SILENCE_SECONDS", 1.0)

    def work(pace, _effort):
        while not pace.ended:
            time.sleep(0.01)
        for _ in range(30):
            time.sleep(0.05)
            pace.rest(0)

    job = BackgroundJob(work, name="test")
    job.start()
    assert job.stop() and job.state == "stopped"


def test_caches_leave_alone_what_a_job_that_does_not_end_works_on(tmp_path, files, monkeypatch, caplog):
    monkeypatch.setattr(background, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(background, "_left_behind", [])
    reading, go_on = threading.Event(), threading.Event()

    def stuck(self, pace, effort):
        reading.set()
        go_on.wait(60)

    monkeypatch.setattr(Caches, "_fill_in_background", stuck)
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("background")
    assert reading.wait(60)
    caches.save()
    caches.close()
    assert caches.report()["vae-x"]["filling"] == "left behind"
    assert "gh200-fill was told to end" in caplog.text
    assert take_in(caches.tables["vae-x"], files[0]), "its memory is still mapped: a thread may be writing there"
    assert list((tmp_path / "packs").rglob("*.pack")) == []
    go_on.set()


def test_background_threads_are_few_and_low():
    assert [background_effort(cores).threads for cores in (1, 2, 8, 16, 72, 288)] == [1, 1, 1, 2, 8, 8]
    assert background_effort(2).share < 1 == background_effort(72).share
    priorities = []
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def work(_pace, _effort):
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    job = BackgroundJob(work, name="test")
    job.start()
    job.wait(20)
    assert priorities == [max(before, pace.NICE)] or priorities == [pace.NICE]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the others stay as they were"


def test_what_others_were_promised_is_not_for_caches(tmp_path, files, monkeypatch):
    machine = HostMemory(total=200, free=100, available=100, limit="test")
    monkeypatch.setattr("simpletuner_gh200.cache.service.host_memory", lambda: machine)
    monkeypatch.setattr("simpletuner_gh200.cache.service.single_pool", lambda: False)
    caches = opened(tmp_path, promised=50)
    assert caches.allowed == 40
    caches.close()


def test_lazy_takes_nothing_in_to_write_packs(tmp_path, files):
    first = opened(tmp_path, packs=tmp_path / "packs")
    first.fill()
    first.save()
    first.close()
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill("lazy")
    table = caches.tables["vae-x"]
    assert caches.report()["vae-x"]["filling"] == "done", "there is nothing in the background"
    caches._save_all()
    assert table.control.held == 0 and table.report()["entries"] == 0, "what is at hand in packs is in packs"
    assert table.find(files[0]) is not None
    caches.close()


def test_saving_first_takes_hold_of_what_the_other_ranks_made(tmp_path, files, monkeypatch):
    """They end as soon as they have stopped filling."""
    caches, told = opened(tmp_path, packs=tmp_path / "packs"), []
    caches.fill()
    stop, table = caches._stop_filling, caches.tables["vae-x"]
    monkeypatch.setattr(table, "hold_all", lambda: told.append("held"))
    monkeypatch.setattr(caches, "_stop_filling", lambda: (told.append("stopped"), stop()))
    caches.save()
    assert told == ["held", "stopped"]
    caches.close()


def test_an_interrupt_while_filling_is_stopped_ends_saving_too(tmp_path, files, monkeypatch):
    caches = opened(tmp_path, packs=tmp_path / "packs")
    caches.fill()
    stop, interrupts = caches._stop_filling, [KeyboardInterrupt()]

    def interrupted():
        if interrupts:
            raise interrupts.pop()
        stop()

    monkeypatch.setattr(caches, "_stop_filling", interrupted)
    with pytest.raises(KeyboardInterrupt):
        caches.save()
    assert caches._stop_saving.is_set()
    assert caches.report()["vae-x"]["filling"] in ("done", "stopped")
    caches.close()
