"""Watching folders: relied on only where it can be, and given back when it is of no use."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from simpletuner_gh200.held import watch


def test_a_folder_that_can_not_be_watched_is_asked_about_once(tmp_path, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(watch, "is_local", lambda folder: asked.append(folder) is not None)
    # The kernel has only so many watches to give, and other tests may hold them: it is not what is asked here.
    monkeypatch.setattr(watch.FolderWatch, "reliable", property(lambda self: True))
    watching = watch.FolderWatch()
    assert [watching.covers(str(tmp_path)) for _ in range(5)] == [False] * 5
    assert len(asked) == 1
    watching.close()


@pytest.fixture
def kernel(monkeypatch):
    """A user has 128 instances of inotify, and other tests may hold them. A pipe stands for one."""
    taken: list[int] = []
    silent, _other_end = os.pipe()

    def take(_flags: int) -> int:
        taken.append(os.dup(silent))
        return taken[-1]

    calls = {"inotify_init1": take, "inotify_add_watch": lambda *_: 1, "fstatfs": watch._libc.fstatfs}
    monkeypatch.setattr(watch, "_libc", SimpleNamespace(**calls))
    return taken


def test_a_link_to_a_file_system_that_others_write_to_is_not_relied_on(tmp_path, kernel) -> None:
    """The link lies on a local one; where it leads, nobody tells us of changes."""
    (tmp_path / "there").symlink_to("/proc/self/task")
    (tmp_path / "here").symlink_to(tmp_path)
    watching = watch.FolderWatch()
    assert not watching.covers(str(tmp_path / "there"))
    assert not watching.covers("/proc/self/task")
    assert watching.covers(str(tmp_path / "here"))


@pytest.mark.parametrize("end", ["closed", "closed twice", "forgotten", "lost"])
def test_a_watch_that_is_of_no_use_any_more_gives_its_instance_back(tmp_path, monkeypatch, kernel, end) -> None:
    monkeypatch.setattr(watch, "LOOK_EVERY_SECONDS", -1.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    watching = watch.FolderWatch()
    assert kernel == [], "nothing to watch, nothing taken"
    assert watching.covers(str(folder))
    (held,) = kernel
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
    assert kernel == [held], "and no other was taken"


def test_without_an_instance_left_files_are_asked_about(tmp_path, kernel) -> None:
    watch._libc.inotify_init1 = lambda _flags: -1
    watching = watch.FolderWatch()
    assert not watching.covers(str(tmp_path))
    assert not watching.reliable
