"""A file that stops being one, or never ends, while a dataset is staged: nothing waits for it, the disk serves it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.store import batch_stager, image_check, staging
from simpletuner_gh200.store.codecs import CHUNK_BYTES
from simpletuner_gh200.store.discovery import BATCH_BYTES
from tests.unit.bounded import bounded
from tests.unit.store.store_samples import fill, image, staged

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


def when_listed(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    walk = staging.walk

    def walked(*arguments: Any, **options: Any) -> Any:
        listing = walk(*arguments, **options)
        change()
        return listing

    monkeypatch.setattr(staging, "walk", walked)


def when_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Before files that were changed shortly before are looked at once more."""
    monkeypatch.setattr("simpletuner_gh200.store.staging.time.sleep", lambda _seconds: change())


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


@bounded
def test_files_beside_it_that_come_from_the_disk_are_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading ahead meets it first."""
    monkeypatch.setattr(batch_stager, "usable", lambda: None)
    monkeypatch.setattr(batch_stager, "is_cold", lambda _fd, _buffer: True)
    fill(tmp_path, {"a.txt": b"1", "b.txt": b"2", "c.txt": b"3"})
    when_listed(monkeypatch, lambda: pipe(tmp_path / "b.txt"))
    dataset, report = staged(tmp_path)
    assert [(problem.path, problem.reason) for problem in report.problems] == [
        (os.fsencode(tmp_path / "b.txt"), "unstable")
    ]
    assert dataset.view(tmp_path / "a.txt") == b"1"
    assert dataset.view(tmp_path / "c.txt") == b"3"


def test_an_image_that_grows_is_shown_to_its_decoder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some plug-ins read all that there is."""
    picture = image("BMP", size=900)
    assert len(picture) > CHUNK_BYTES
    path = fill(tmp_path, {"a.bmp": picture}) / "a.bmp"
    opened, seen = image_check._open, []

    def grown(source: Any, expected: str) -> Any:
        if isinstance(source, image_check.io.BytesIO):
            return opened(source, expected)
        os.truncate(path, len(picture) + (1 << 20))
        seen.append(len(source.read()))
        source.seek(0)
        return opened(source, expected)

    monkeypatch.setattr(image_check, "_open", grown)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert image_check.check_image(picture[:100], False, fd, "BMP", "decode") == (True, "")
    finally:
        os.close(fd)
    assert seen[0] == len(picture)
