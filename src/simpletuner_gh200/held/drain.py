"""The drainer: copies a checkpoint from memory to the disk, checks every byte there, and only then gives it its name.

A process of its own for each checkpoint, at low priority. What it copied before it was killed, and is whole, is not
copied again. While the disk refuses (full, read-only, gone), the memory keeps the checkpoint and it is tried again.

Where several nodes have a part each, all copy into one draft. Each leaves a list of its files beside it when the disk
has them; the first node's drainer waits for all lists, gives the name and takes the lists away, for which the others
wait.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simpletuner_gh200.held.saved import OWNER, MemoryFolder, Order, Told, beside, claimed
from simpletuner_gh200.memory.background import NICE
from simpletuner_gh200.units import MIB, format_seconds

BLOCK = 4 * MIB
FLUSH_EVERY = 64 * MIB
"""Bytes after which the disk is waited for: the page cache is not filled with what nobody reads again."""

_UNKNOWN_THERE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)


BEAT = 5.0
"""Seconds between signs of life: whoever sees the draft from elsewhere waits for it."""


class Lost(OSError):
    """A memory no longer has all of the checkpoint; that will not come back."""


class Late(OSError):
    """The output folder is another run's by now, or was made anew."""


def main(arguments: list[str]) -> int:
    folder = MemoryFolder(Path(arguments[0]))
    with folder.draining() as alone:
        order = folder.order() if alone else None
        if order is None:
            return 0
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # Linux takes the priority of its reads and writes from it
        threading.Thread(target=_show_life, args=(folder.draft(order),), daemon=True).start()
        told = carry_out(folder, order)
        folder.conclude(order, told)
        if not told.given_up and not folder.locked(OWNER):
            folder.remove()
    return int(told.given_up)


def _show_life(draft: Path) -> None:
    while True:
        with suppress(OSError):  # it is not there yet, or its disk keeps no times: then its growth has to do
            os.utime(draft)
        time.sleep(BEAT)


def carry_out(folder: MemoryFolder, order: Order) -> Told:
    """Until it is on the disk, or the patience with the disk ends."""
    began = failing_since = time.monotonic()
    draft, most, begun = folder.draft(order), -1, folder.told() is not None
    folder.tell(Told(order.source))
    while True:
        try:
            size = drain(folder, order, begun=begun)
            return Told(order.source, time.monotonic() - began, size)
        except OSError as refused:
            now, written, begun = time.monotonic(), _written(draft), True
            if written > most:  # it has got further than ever: what refuses now is something new
                most, failing_since = written, now
            lost = isinstance(refused, Lost) or (isinstance(refused, Late) and not folder.locked(OWNER))
            given_up = lost or now - failing_since > order.patience
            told = Told(order.source, now - began, failing=str(refused), given_up=given_up)
            if told.given_up:
                _give_up(draft, order)
                return told
            folder.tell(told)
            time.sleep(min(2.0, order.patience / 10))


def _give_up(draft: Path, order: Order) -> None:
    if order.part == 0:
        _put_back(draft, Path(order.target))
        shutil.rmtree(draft, ignore_errors=True)
    _unlist(draft, order)


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


def drain(folder: MemoryFolder, order: Order, *, begun: bool = False) -> int:
    """Copy what was given by way of the draft; how many bytes that is. Raises OSError, and the target is as it was.

    ``begun``: was this order begun before? Then it may be carried out already. Raises Lost where the memory no longer
    has what was given, Late where the output folder takes it no more.
    """
    source, target, draft = folder.path / order.source, Path(order.target), folder.draft(order)
    rest = _paced(order.rate)
    there = dict(_files(source))
    for name, size in (order.files or {}).items():
        if name not in there or there[name].st_size < size:
            raise Lost(f"{source / name} is no longer in memory: another process removed it")
    _check_place(order)
    given = there if order.files is None else order.files
    files = {name: found for name, found in there.items() if name in given or stat.S_ISDIR(found.st_mode)}
    if not _is_done(files, source, draft, order, begun=begun):
        draft.mkdir(exist_ok=True)
        for name, found in files.items():
            _copy(source / name, draft / name, found, rest)
        for each, _folders, _names in os.walk(draft, topdown=False):
            _synced(each)
        if order.part > 0:
            _list(draft, order, files)
        else:
            _await(draft, order, lambda: [part for part in range(1, order.parts) if not _is_there(draft, part)])
            _check_still(order, draft, files)
            _rename(draft, target)
    if order.part > 0:
        _await(draft, order, lambda: [0] if _listed(draft, order.part) is not None else [])
        if not target.exists():
            raise Lost("the first node has given it up")
    else:
        shutil.rmtree(beside(draft, "old"), ignore_errors=True)
        _unlist(draft, order)
        _synced(target.parent)
    return sum(found.st_size for found in files.values() if stat.S_ISREG(found.st_mode))


def _check_place(order: Order) -> None:
    """A disk that is away comes back; a folder that is gone from a disk that is there does not."""
    if order.disk is None:
        return
    output = Path(order.target).parent
    if claimed(output) != order.run:
        nearest = next(path for path in (output, *output.parents) if path.exists())
        if nearest.stat().st_dev == order.disk:
            raise Late(f"{output} is no longer the folder of the run that saved it")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(output))


def _check_still(order: Order, draft: Path, files: dict[str, os.stat_result]) -> None:
    """Whoever took this drainer for dead, while it stood still, has cleared the draft; what is missing comes again."""
    _check_place(order)
    for name, found in files.items():
        if stat.S_ISREG(found.st_mode) and (draft / name).stat().st_size != found.st_size:
            raise OSError(f"{draft / name} was changed by somebody else")


def _is_done(files: dict[str, os.stat_result], source: Path, draft: Path, order: Order, *, begun: bool) -> bool:
    """Was it carried out, and its drainer killed before it could say so?"""
    target = Path(order.target)
    if order.part > 0 and begun and _listed(draft, order.part) is not None:
        return True
    if not target.is_dir() or (order.parts > 1 and (draft.exists() or not begun)):
        return False
    found = dict(_files(target)).keys()
    return (files.keys() == found or (order.parts > 1 and files.keys() <= found)) and _all_same(files, source, target)


# -- several nodes -------------------------------------------------------------------------------------------


def _list(draft: Path, order: Order, files: dict[str, os.stat_result]) -> None:
    """The disk has this node's part, every byte compared: the list comes last, and whole."""
    sizes = {name: found.st_size for name, found in files.items() if stat.S_ISREG(found.st_mode)}
    place = beside(draft, f"part{order.part}")
    unfinished = place.with_name(f"{place.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(sizes, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(place)


def _unlist(draft: Path, order: Order) -> None:
    """The first node's takes all lists back; another's its own."""
    for part in range(1, order.parts):
        if order.part in (0, part):
            beside(draft, f"part{part}").unlink(missing_ok=True)


def _await(draft: Path, order: Order, missing: Callable[[], list[int]]) -> None:
    """For other nodes' drainers. Raises Lost where nothing more comes from them."""
    most, since = -1, time.monotonic()
    while waits_for := missing():
        if (written := _written(draft)) > most:
            most, since = written, time.monotonic()
        if time.monotonic() - since > order.patience:
            nodes = ", ".join(str(part + 1) for part in waits_for)
            waited = format_seconds(order.patience)
            raise Lost(f"nothing came for {waited} from node {nodes} of {order.parts}, each of which has a part of it")
        time.sleep(0.1)


def _is_there(draft: Path, part: int) -> bool:
    """All that its list names, as this node sees the disk."""
    listed = _listed(draft, part)
    try:
        return listed is not None and all((draft / name).stat().st_size == size for name, size in listed.items())
    except FileNotFoundError:
        return False


def _listed(draft: Path, part: int) -> dict[str, int] | None:
    """Read anew: network file systems are sure of what is there only when it is opened."""
    try:
        found: dict[str, int] = json.loads(beside(draft, f"part{part}").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


# -- one file after another ----------------------------------------------------------------------------------


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
    older = beside(draft, "old")
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
        if beside(draft, "old").exists() and not target.exists():
            beside(draft, "old").rename(target)


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
