"""All caches together: filled at the start, in the background or as they are asked for; within a budget; packed."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from simpletuner_gh200.held import caches as module
from simpletuner_gh200.held import fill as filling
from simpletuner_gh200.held.cache import MISSING
from simpletuner_gh200.held.caches import Caches, Wanted
from simpletuner_gh200.held.listing import cache_files
from simpletuner_gh200.memory import background
from simpletuner_gh200.memory.background import BackgroundPace
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.memory.sharing import NodeGroup

COUNT = 30


def alone() -> NodeGroup:
    return NodeGroup.from_environment("test", {})


@pytest.fixture
def files(saved):
    return [saved(torch.full((100,), float(number)), f"vae/sub/{number}.pt") for number in range(COUNT)]


@pytest.fixture
def opened(tmp_path):
    made: list[Caches] = []

    def open_caches(*, allowed=None, made_by="", packs=True, expected=0, folder="vae", group=None, **options) -> Caches:
        wanted = Wanted("vae-x", "vae", str(tmp_path / folder), expected, made_by=made_by)
        root = tmp_path / "packs" if packs else None
        made.append(Caches([wanted], allowed=allowed, group=group or alone(), packs=root, **options))
        return made[-1]

    yield open_caches
    for one in made:
        one.close()


@pytest.fixture
def packed(files, opened):
    """The same files, which a run before this has packed."""
    first = opened()
    first.fill()
    first.save()
    first.close()
    return files


def values(caches, files):
    got = [caches.caches["vae-x"].get(path) for path in files]
    return [None if value is MISSING else float(value[0]) for value in got]


EVERYTHING = [float(number) for number in range(COUNT)]


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
    monkeypatch.setattr(filling, "MOST_FILES", 4)
    monkeypatch.setattr(background, "background_effort", lambda cores: background.Effort(1, 1.0))
    yield go_on
    go_on.set()


# -- while training runs -------------------------------------------------------------------------------------------


def test_fill_returns_before_anything_is_in_and_entries_come_by_themselves(files, opened, held_up):
    caches = opened()
    caches.fill("background")
    assert not caches.wait_until_filled(0.05)
    assert None in values(caches, files)
    assert caches.report()["vae-x"]["filling"] == "running"
    held_up.set()
    assert caches.wait_until_filled(20)
    assert values(caches, files) == EVERYTHING
    assert caches.report()["vae-x"]["filling"] == "done"


def test_what_is_asked_for_first_comes_from_the_pack_at_once(packed, opened, held_up):
    caches = opened()
    caches.fill("background", later=True)
    assert caches.report()["vae-x"]["filling"] == "waiting"
    assert values(caches, packed) == EVERYTHING
    assert caches.caches["vae-x"].held_bytes == 0, "where it lies"
    caches.save()
    caches.go_on()
    assert caches.report()["vae-x"]["filling"] == "stopped", "a run that ends before its first step begins nothing"


def test_saving_stops_it_and_what_came_so_far_goes_into_packs(files, opened, held_up):
    caches = opened()
    caches.fill("background")
    time.sleep(0.1)
    caches.save()
    taken = len(caches.caches["vae-x"].shelf)
    caches.close()
    assert 0 < taken < COUNT
    again = opened()
    assert len(again.caches["vae-x"].shelf) == taken
    again.fill()
    assert values(again, files) == EVERYTHING


@pytest.mark.parametrize("when", ["lazy", "background"])
def test_what_is_asked_for_or_made_is_taken_in_by_and_by(files, opened, saved, when):
    caches = opened()
    caches.fill(when, later=True)
    cache = caches.caches["vae-x"]
    for path in files[:7]:
        assert cache.get(path) is MISSING
        cache.wish(path)
    cache.wish(saved(torch.full((100,), 99.0), "vae/new.pt"))
    assert caches.wait_until_filled(20)
    assert len(cache.shelf) == 8
    assert values(caches, files[:7]) == EVERYTHING[:7]
    cache.wish(files[8])
    caches.save()  # what was asked for a moment ago goes into packs too
    caches.close()
    assert values(opened(), files[:9]) == [*EVERYTHING[:7], None, EVERYTHING[8]]


def test_a_cache_that_simpletuner_makes_anew_is_dropped_and_filled_again(files, opened):
    caches = opened(allowed=200_000)
    caches.fill()
    caches.drop("vae-x")
    assert values(caches, files) == [None] * COUNT
    for path in files:
        caches.caches["vae-x"].wish(path)
    assert caches.wait_until_filled(20)
    assert values(caches, files) == EVERYTHING
    assert caches.report()["vae-x"]["fallbacks"] == {}


# -- packs ---------------------------------------------------------------------------------------------------------


def test_packs_are_written_and_read_at_the_next_start(files, opened):
    for turn in range(2):
        caches = opened()
        caches.fill()
        assert values(caches, files) == EVERYTHING
        report = caches.report()["vae-x"]
        assert (report["entries"], report["hits"], report["misses"], report["hit_rate"]) == (COUNT, COUNT, 0, 1.0)
        assert report["packs"]["entries"] == COUNT * turn
        assert turn or (report["bytes"] >= COUNT * 400 and report["fill_seconds"] > 0)
        caches.save()
        assert caches.report()["vae-x"]["packs"]["damaged"] == 0
        caches.close()


@pytest.mark.parametrize("when", ["start", "background", "lazy"])
def test_packs_of_another_configuration_are_not_served(packed, opened, when):
    """The very files, encoded for another VAE's run."""
    caches = opened(made_by="another VAE")
    assert values(caches, packed) == [None] * COUNT
    caches.fill(when)
    caches.wait_until_filled(20)
    if when != "lazy":
        assert caches.report()["vae-x"]["packs"]["of_others"] == COUNT
        assert caches.caches["vae-x"].held_bytes > 0


@pytest.mark.parametrize("when", ["start", "background"])
@pytest.mark.parametrize("copies", [False, True])
def test_what_a_device_copies_from_is_copied_out_of_packs_behind_the_run(packed, opened, when, copies):
    caches = opened(copies=copies)
    caches.fill(when, later=True)
    cache = caches.caches["vae-x"]
    assert values(caches, packed) == EVERYTHING
    assert cache.held_bytes == 0
    caches.go_on()
    assert caches.wait_until_filled(20)
    assert [cache.find(path).address is not None for path in packed] == [copies] * COUNT
    assert values(caches, packed) == EVERYTHING
    caches.save()
    assert len(list(caches.served["vae-x"].packs.folder.rglob("*.pack"))) == 1, "what is in memory is in packs already"


def test_each_rank_copies_its_part_out_of_packs(packed, opened):
    caches = opened(copies=True)
    caches.group.local_world_size, caches.group.local_rank = 2, 1
    caches._settle(background.AT_ONCE, None)
    cache = caches.caches["vae-x"]
    copied = [path for path in packed if cache.find(path).address]
    assert copied == [path for path in packed if module.key_of(path)[0] % 2 == 1]


def test_what_has_no_room_in_memory_is_read_in_packs(packed, opened):
    caches = opened(copies=True, allowed=5000)
    caches.fill()
    assert caches.wait_until_filled(20)
    where = [caches.caches["vae-x"].find(path).address is not None for path in packed]
    assert 0 < sum(where) < COUNT
    assert values(caches, packed) == EVERYTHING


# -- ending --------------------------------------------------------------------------------------------------------


def test_caches_leave_alone_what_a_job_that_does_not_end_works_on(files, opened, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(background, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(background, "_left_behind", [])
    reading, go_on = threading.Event(), threading.Event()

    def stuck(self, pace, effort):
        reading.set()
        go_on.wait(60)

    monkeypatch.setattr(Caches, "_fill_in_background", stuck)
    caches = opened()
    caches.caches["vae-x"].shelf.board  # noqa: B018
    caches.served["vae-x"].filler.fill(files[:1])
    caches.fill("background")
    assert reading.wait(60)
    caches.save()
    caches.close()
    assert caches.report()["vae-x"]["filling"] == "left behind"
    assert "gh200-fill does not stop" in caplog.text
    assert values(caches, files[:1]) == [0.0], "its memory is still there: a thread may be at it"
    assert list((tmp_path / "packs").rglob("*.pack")) == []
    go_on.set()


def test_an_interrupt_while_filling_is_stopped_ends_saving_too(files, opened, monkeypatch):
    caches = opened()
    caches.fill()
    stop, interrupts = caches._stop_filling, [KeyboardInterrupt()]

    def interrupted():
        if interrupts:
            raise interrupts.pop()
        return stop()

    monkeypatch.setattr(caches, "_stop_filling", interrupted)
    with pytest.raises(KeyboardInterrupt):
        caches.save()
    assert caches._stop_saving.is_set()
    assert caches.report()["vae-x"]["filling"] in ("done", "stopped")


# -- budget and progress -------------------------------------------------------------------------------------------


def test_what_others_were_promised_is_not_for_caches(files, opened, monkeypatch):
    machine = HostMemory(total=200, free=100, available=100, limit="test")
    monkeypatch.setattr(module, "host_memory", lambda: machine)
    monkeypatch.setattr(module, "single_pool", lambda: False)
    assert opened(promised=50).allowed == 40


def test_what_is_still_to_come_is_told_to_others(files, opened):
    """Model state leaves it alone: what the caches will hold, or may, less what they hold."""
    on_disk = sum(Path(path).stat().st_size for path in files)
    for allowed, promised in ((None, on_disk), (20_000, 20_000)):
        caches = opened(allowed=allowed, packs=False)
        assert caches.memory_to_come == promised
        caches.fill()
        assert caches.memory_to_come == max(promised - caches.caches["vae-x"].held_bytes, 0) < promised


def test_a_sample_that_missed_a_large_entry_costs_no_more_than_the_budget(files, saved, opened, monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.held.listing.SAMPLES", 4)
    saved(torch.zeros(100_000), "vae/sub/large.pt")
    for allowed in (10**9, 100_000):
        caches = opened(allowed=allowed, packs=False)
        caches.fill()
        assert caches.caches["vae-x"].held_bytes <= allowed
    assert caches.report()["vae-x"]["entries"] >= COUNT // 2


def test_a_small_budget_keeps_a_fixed_subset_and_says_so(files, opened, caplog):
    kept = []
    for _ in range(2):
        caches = opened(allowed=20_000, packs=False)
        caches.fill()
        kept.append(values(caches, files))
        assert caches.caches["vae-x"].held_bytes <= 20_000
        found = sum(value is not None for value in kept[-1])
        assert 0 < found == round(caches.caches["vae-x"].statistics.expected_hit_rate * COUNT) < COUNT
    assert kept[0] == kept[1]
    assert "expected hit rate" in caplog.text and "would hold all" in caplog.text
    caches.caches["vae-x"].wish(files[kept[1].index(None)])
    assert caches.wait_until_filled(20)
    assert values(caches, files) == kept[1], "what is asked for changes nothing about it"


def test_a_budget_is_of_what_no_pack_has(packed, opened, saved):
    """Packs are in the page cache, which counts for nobody: with them a small budget holds all."""
    new = saved(torch.full((100,), 7.0), "vae/new.pt")
    caches = opened(allowed=3000)
    assert caches.caches["vae-x"].statistics.expected_hit_rate == 1.0
    caches.fill()
    assert values(caches, [*packed, new]) == [*EVERYTHING, 7.0]


def test_progress_in_logs_counts_bytes_that_were_taken_in(files, opened, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.telemetry.progress.LINE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with caplog.at_level(logging.INFO, "simpletuner_gh200"):
        caches = opened(workers=1)
        caches.fill()
        lines = [record.getMessage() for record in caplog.records if "filling cache vae-x" in record.getMessage()]
        assert f"{COUNT}/{COUNT}, " in lines[-1]
        assert not lines[-1].endswith(" 0 B/s")
        caplog.clear()
        caches.served["vae-x"].files = cache_files(str(tmp_path / "vae"))
        caches.fill()
    assert "filling cache" not in caplog.text, "nothing was left to take in"


def test_listing_gives_signs_of_life(tmp_path, opened, monkeypatch):
    """A cache of millions on a slow file system takes minutes, in which the other ranks wait for this one."""
    group, beats = alone(), []
    monkeypatch.setattr(group, "beat", lambda: beats.append(True))
    monkeypatch.setattr("simpletuner_gh200.held.bulk.ENTRIES_BYTES", 4096)
    for letter in "abcdefghijklmnopqrst":
        (tmp_path / "many" / letter).mkdir(parents=True)
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(1000):
        (wide / f"{number:020}.pt").touch()
    for name, least in (("many", 20), ("wide", 8)):  # at every folder; at every piece of a large one
        beats.clear()
        opened(folder=name, group=group, packs=False)
        assert len(beats) >= least, name
