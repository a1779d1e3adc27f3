"""A file that stops being one, or never ends, while a dataset is staged: nothing waits for it, the disk serves it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.held import stager, staging
from simpletuner_gh200.held.listing import BATCH_BYTES
from tests.unit.bounded import bounded
from tests.unit.held.held_samples import fill, staged

pytestmark = pytest.mark.usefixtures("file_calls")

Change = Callable[[Path], None]


def link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def listening(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def endless(path: Path) -> None:
    """From now on it has grown by as much as was read of it, after each reading."""

    def growing(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(fd: int, *arguments: Any) -> Any:
            got = read(fd, *arguments)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                os.truncate(path, os.fstat(fd).st_size + (got if isinstance(got, int) else len(got)))
            return got

        return reads

    os.pread, os.preadv = growing(os.pread), growing(os.preadv)  # for good: in a child of its own
    stager.library_if_any = lambda: None  # which reads past them


def when_listed(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    list_files = staging.list_files

    def listed(*arguments: Any, **options: Any) -> Any:
        listing = list_files(*arguments, **options)
        change()
        return listing

    monkeypatch.setattr(staging, "list_files", listed)


def when_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Before files that were changed shortly before are read."""
    sleep = time.sleep
    monkeypatch.setattr("simpletuner_gh200.held.staging.time.sleep", lambda seconds: (change(), sleep(seconds)))


@pytest.mark.parametrize("size", [200, BATCH_BYTES + 1], ids=["small", "large"])
@pytest.mark.parametrize("moment", [when_listed, when_read])
@pytest.mark.parametrize("becomes", [link_to_a_device, pipe, folder, listening, endless])
@bounded
def test_it_is_called_unstable_and_left_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: Change, moment: Any, size: int
) -> None:
    path = tmp_path / "a.txt"
    fill(tmp_path, {"a.txt": os.urandom(size), "b.txt": b"another"})
    moment(monkeypatch, lambda: becomes(path))
    dataset, report = staged(tmp_path, compression="auto", max_corruption_rate=0.0)
    assert dataset.view(tmp_path / "b.txt") == b"another"
    assert [(problem.path, problem.reason) for problem in report.problems] == [(os.fsencode(path), "unstable")]
    assert dataset.view(path) is None
