"""The drainer: copies a checkpoint from memory to the disk, checks every byte there, and only then gives it its name.

A process of its own for each checkpoint, at low priority. What it copied before it was killed, and is whole, is not
copied again. While the disk refuses (full, read-only, gone), the memory keeps the checkpoint and it is tried again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from simpletuner_gh200.held.saved import OWNER, MemoryFolder, Order, Told
from simpletuner_gh200.memory.background import NICE
from simpletuner_gh200.units import MIB

BLOCK = 4 * MIB
FLUSH_EVERY = 64 * MIB
"""Bytes after which the disk is waited for: the page cache is not filled with what nobody reads again."""

_UNKNOWN_THERE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_LOWEST_OF_THE_USUAL = 2 << 13 | 7
"""Not the idle class, which a busy disk never serves."""


class Lost(OSError):
    """The memory no longer has all of the checkpoint; that will not come back."""


def main(arguments: list[str]) -> int:
    folder = MemoryFolder(Path(arguments[0]))
    with folder.draining() as alone:
        order = folder.order() if alone else None
        if order is None:
            return 0
        _step_back()
        told = carry_out(folder, order)
        folder.conclude(order, told)
        if not told.given_up and not folder.locked(OWNER):
            folder.remove()
    return int(told.given_up)


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _LOWEST_OF_THE_USUAL)


def carry_out(folder: MemoryFolder, order: Order) -> Told:
    """Until it is on the disk, or the patience with the disk ends."""
    began = failing_since = time.monotonic()
    source, target, draft, most = folder.path / order.source, Path(order.target), folder.draft(order), -1
    while True:
        try:
            size = drain(source, target, draft, _paced(order.rate), order.files)
            return Told(order.source, time.monotonic() - began, size)
        except OSError as refused:
            now, written = time.monotonic(), _written(draft)
            if written > most:  # it has got further than ever: what refuses now is something new
                most, failing_since = written, now
            lost = isinstance(refused, Lost)
            given_up = lost or now - failing_since > order.patience
            told = Told(order.source, now - began, failing=str(refused), given_up=given_up)
            if told.given_up:
                _put_back(draft, target)
                shutil.rmtree(draft, ignore_errors=True)
                return told
            folder.tell(told)
            time.sleep(min(2.0, order.patience / 10))


def _written(draft: Path) -> int:
    try:
        return sum(found.st_size for _name, found in _files(draft) if stat.S_ISREG(found.st_mode))
    except OSError:  # the disk is gone
        return 0


def _paced(rate: float | None) -> Callable[[int], None]:
    began, done = time.monotonic(), 0

    def rest(size: int) -> None:
        nonlocal done
        done += size
        if rate is not None:
            time.sleep(max(0.0, began + done / rate - time.monotonic()))

    return rest


def drain(
    source: Path,
    target: Path,
    draft: Path,
    rest: Callable[[int], None] = lambda size: None,
    given: Mapping[str, int] | None = None,
) -> int:
    """Copy the folder by way of ``draft``; how many bytes it has. Raises OSError, and then ``target`` is as it was.

    Raises Lost where the memory no longer has the files that were ``given``, by name and length.
    """
    files = dict(_files(source))
    for name, size in (given or {}).items():
        if name not in files or files[name].st_size < size:
            raise Lost(f"{source / name} is gone from memory: somebody else has removed it")
    if not (target.is_dir() and files.keys() == dict(_files(target)).keys() and _all_same(files, source, target)):
        draft.mkdir(exist_ok=True)
        for name, found in files.items():
            _copy(source / name, draft / name, found, rest)
        for folder, _folders, _names in os.walk(draft, topdown=False):
            _synced(folder)
        _rename(draft, target)
    shutil.rmtree(_older(draft), ignore_errors=True)
    _synced(target.parent)
    return sum(found.st_size for found in files.values() if stat.S_ISREG(found.st_mode))


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below, a folder before what is in it."""
    for path in sorted(folder.rglob("*")):
        found = path.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is neither a file nor a folder")
        yield path.relative_to(folder).as_posix(), found


def _all_same(files: dict[str, os.stat_result], source: Path, target: Path) -> bool:
    return all(_same(source / name, target / name) for name, found in files.items() if stat.S_ISREG(found.st_mode))


def _copy(source: Path, target: Path, found: os.stat_result, rest: Callable[[int], None]) -> None:
    if stat.S_ISDIR(found.st_mode):
        target.mkdir(exist_ok=True)
    elif not (target.exists() and _same(source, target)):
        with source.open("rb") as reader, target.open("wb") as writer:
            _pour(reader.fileno(), writer.fileno(), rest)
        if not _same(source, target) or target.stat().st_size != found.st_size:
            raise OSError(f"{target} differs from what was written to it")
    with _where_it_can():
        os.chmod(target, stat.S_IMODE(found.st_mode))
    if stat.S_ISREG(found.st_mode):
        with _where_it_can():
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _pour(reader: int, writer: int, rest: Callable[[int], None]) -> None:
    pending = 0
    while sent := os.sendfile(writer, reader, None, BLOCK):
        rest(sent)
        pending += sent
        if pending >= FLUSH_EVERY:
            os.fdatasync(writer)
            pending = 0


def _same(source: Path, target: Path) -> bool:
    """Byte by byte, as the disk has it: what is in the page cache is written out and dropped first."""
    with source.open("rb") as one, target.open("r+b") as other:
        os.fsync(other.fileno())
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := one.read(BLOCK):
            if other.read(BLOCK) != block:
                return False
        whole = not other.read(1)
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return whole


def _rename(draft: Path, target: Path) -> None:
    """Where a checkpoint of that name is there already, it goes only when this one is in its place."""
    older = _older(draft)
    if target.exists():
        shutil.rmtree(older, ignore_errors=True)
        target.rename(older)
    try:
        draft.rename(target)
    except OSError:
        _put_back(draft, target)
        raise


def _put_back(draft: Path, target: Path) -> None:
    """The older one, where nothing has come in its place; the next start tries again where that fails."""
    with suppress(OSError):
        if _older(draft).exists() and not target.exists():
            _older(draft).rename(target)


def _older(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}.old")


def _synced(folder: str | Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _where_it_can():
            os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _where_it_can() -> Iterator[None]:
    """Some network and FUSE file systems sync no folders, and keep neither modes nor times: no byte is lost by it."""
    try:
        yield
    except OSError as refused:
        if refused.errno not in _UNKNOWN_THERE:
            raise


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
