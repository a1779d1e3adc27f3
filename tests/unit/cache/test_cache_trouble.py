"""What goes wrong around a cache costs time, never the run: no memory, vanished files, packs that can't be had."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from simpletuner_gh200.cache import watch
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.inspect import drop, pack_again, packed_caches
from simpletuner_gh200.cache.listing import cache_files
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import MARKER
from simpletuner_gh200.cache.segments import next_size
from simpletuner_gh200.cache.service import TIGHT_GROWTH, Caches, Wanted
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend
from simpletuner_gh200.units import GIB

MOST_SEGMENTS = 1024
"""What the control block has room for."""


@pytest.mark.parametrize("ranks", [1, 8])
def test_all_of_grace_memory_fits_into_the_segments_there_are(ranks: int) -> None:
    """Each rank has one that it fills; sizes follow what all of them hold."""
    held = count = unused = 0
    while held < 480 * GIB:
        unused = next_size(TIGHT_GROWTH, held)
        held += unused
        count += 1
    assert count + ranks < MOST_SEGMENTS
    assert unused * ranks < 0.05 * held


class Refusing:
    """A driver that registers no more memory."""

    def __init__(self, good: int) -> None:
        self.good = good

    def make(self, size: int, *, label: str, shared: bool) -> Slab:
        if not self.good:
            raise FeatureUnavailable("no more can be registered", remedy="none")
        self.good -= 1
        return Slab.shared(size, label=label)

    def attach(self, fd: int, size: int, *, label: str) -> Slab:
        return Slab.attach(fd, size, label=label)


class Backend:
    def torch_load(self, filename):
        return torch.load(filename)

    def torch_save(self, data, original_location): ...
    def write(self, filepath, data): ...
    def delete(self, filepath): ...


def test_memory_that_is_refused_in_mid_run_leaves_the_value_to_simpletuner(saved, tmp_path) -> None:
    table = Table("t", Control.create(64, label="t", shared=False), slabs=Refusing(1), growth=1 << 20)
    paths = [saved(torch.full((100_000,), float(n)), f"{n}.pt") for n in range(4)]
    backend = Backend()
    for patch in ServedBackend(backend, [Route(str(tmp_path), table)]).patches:
        patch.install()
    assert [float(backend.torch_load(path)[0]) for path in paths] == [0, 1, 2, 3]
    assert table.statistics.fallbacks == {"no memory: FeatureUnavailable": 2}
    assert table.statistics.published.value == 2
    table.close()


def test_one_dangling_link_hides_no_other_file(saved, tmp_path) -> None:
    for number in range(20):
        saved(torch.zeros(1), f"{number}.pt")
        (tmp_path / f"gone-{number}.pt").symlink_to(tmp_path / "nowhere")
    assert len(list(cache_files(str(tmp_path)))) == 20


def test_dropped_segments_are_no_longer_counted_as_held(saved) -> None:
    table = Table("t", Control.create(64, label="t", shared=False), growth=1 << 20)
    paths = [saved(torch.zeros(100_000), f"{n}.pt") for n in range(8)]
    for path in paths:
        assert take_in(table, path)
    before, segments = table.control.held, len(table.control.rows())
    for path in paths:
        table.invalidate(path)
    assert len(table.control.rows()) < segments
    assert table.control.held < before
    assert table.control.held == sum(row.held for row in table.control.rows())
    table.close()


def test_a_full_budget_is_said_once(saved, caplog) -> None:
    table = Table("t", Control.create(64, label="t", shared=False), allowed=500_000)
    for number in range(4):
        take_in(table, saved(torch.zeros(100_000), f"{number}.pt"))
    assert table.statistics.fallbacks == {"over budget": 3}
    assert len([record for record in caplog.records if "its budget of 488 KiB is full" in record.message]) == 1
    table.close()


@pytest.fixture
def wanted(saved, tmp_path) -> Wanted:
    for number in range(3):
        saved(torch.zeros(8), f"cache/{number}.pt")
    return Wanted("c", "vae", str(tmp_path / "cache"))


def served_entries(wanted: Wanted, packs) -> int:
    caches = Caches([wanted], allowed=None, group=NodeGroup.from_environment("test", {}), packs=packs)
    try:
        caches.fill()
        caches.save()
        return caches.report()["c"]["entries"]
    finally:
        caches.close()


def test_packs_that_have_no_place_are_done_without(wanted, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    assert served_entries(wanted, tmp_path / "file" / "packs") == 3
    assert "cache c goes without packs" in caplog.text


def test_a_pack_that_can_not_be_read_is_left_alone(wanted, tmp_path, caplog) -> None:
    assert served_entries(wanted, tmp_path / "packs") == 3
    (pack,) = (tmp_path / "packs").rglob("*.pack")
    pack.unlink()
    pack.mkdir()  # opening it fails, for root too
    assert served_entries(wanted, tmp_path / "packs") == 3
    assert "a pack can't be read" in caplog.text
    assert pack.is_dir()


def test_a_marker_that_was_cut_short_is_written_again_and_never_followed(wanted, tmp_path) -> None:
    served_entries(wanted, tmp_path / "packs")
    (marker,) = (tmp_path / "packs").rglob(MARKER)
    marker.write_text("")
    assert packed_caches(tmp_path / "packs") == [], "an empty name would be the working directory"
    served_entries(wanted, tmp_path / "packs")
    assert [cache.source for cache in packed_caches(tmp_path / "packs")] == [str(tmp_path / "cache")]
    assert not [name for name in os.listdir(marker.parent) if name.endswith(".tmp")]
    assert PackFolder(marker.parent).packs()


def test_a_folder_that_can_not_be_watched_is_asked_about_once(tmp_path, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(watch, "is_local", lambda folder: asked.append(folder) is not None)
    # The kernel has only so many watches to give, and other tests may hold them: it is not what is asked here.
    monkeypatch.setattr(watch.FolderWatch, "reliable", property(lambda self: True))
    watching = watch.FolderWatch()
    assert [watching.covers(str(tmp_path)) for _ in range(5)] == [False] * 5
    assert len(asked) == 1
    watching.close()


def test_a_link_to_a_file_system_that_others_write_to_is_not_relied_on(tmp_path, monkeypatch) -> None:
    """The link lies on a local one; where it leads, nobody tells us of changes."""
    monkeypatch.setattr(watch.FolderWatch, "reliable", property(lambda self: True))
    # As above: whether the kernel has a watch left is not what is asked here.
    kernel = SimpleNamespace(
        inotify_init1=lambda _flags: os.open(os.devnull, os.O_RDONLY), inotify_add_watch=lambda *_: 1
    )
    monkeypatch.setattr(watch, "_libc", kernel)
    (tmp_path / "there").symlink_to("/proc/self/task")
    (tmp_path / "here").symlink_to(tmp_path)
    watching = watch.FolderWatch()
    assert not watching.covers(str(tmp_path / "there"))
    assert not watching.covers("/proc/self/task")
    assert watching.covers(str(tmp_path / "here"))
    watching.close()


@pytest.mark.parametrize("end", ["closed", "closed twice", "forgotten", "lost"])
def test_a_watch_that_is_of_no_use_any_more_gives_its_instance_back(tmp_path, monkeypatch, end) -> None:
    """A user has 128 of them, for all programs. As above: here, the end of a pipe stands for one."""
    taken: list[int] = []
    silent, _other_end = os.pipe()

    def take(_flags: int) -> int:
        taken.append(os.dup(silent))
        return taken[-1]

    monkeypatch.setattr(watch, "_libc", SimpleNamespace(inotify_init1=take, inotify_add_watch=lambda *_: 1))
    monkeypatch.setattr(watch, "LOOK_EVERY_SECONDS", -1.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    watching = watch.FolderWatch()
    assert taken == [], "nothing to watch, nothing taken"
    assert watching.covers(str(folder))
    (held,) = taken
    os.fstat(held)
    if end == "forgotten":
        del watching
    elif end == "lost":
        folder.rename(tmp_path / "elsewhere")
        assert watching.changed() == []
        assert not watching.reliable
        assert not watching.covers(str(tmp_path))
    else:
        for _ in end.split():
            watching.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    assert taken == [held], "and no other was taken"


def test_without_an_instance_left_files_are_asked_about(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(watch, "_libc", SimpleNamespace(inotify_init1=lambda _flags: -1))
    watching = watch.FolderWatch()
    assert not watching.covers(str(tmp_path))
    assert not watching.reliable


def test_commands_leave_packs_alone_that_another_job_is_writing(wanted, tmp_path) -> None:
    served_entries(wanted, tmp_path / "packs")
    (cache,) = packed_caches(tmp_path / "packs")
    before = PackFolder(cache.folder).packs()
    with PackFolder(cache.folder).locked() as ours:
        assert ours
        assert "another job is writing" in drop(cache)["problems"][0]
        assert "nothing was written" in pack_again(cache, workers=1)["problems"][0]
    assert PackFolder(cache.folder).packs() == before
    assert pack_again(cache, workers=1)["problems"] == []
    assert drop(cache)["packs"] == 1
    assert not cache.folder.exists()
