"""What may happen to a file behind our back. Each does it to ``path``; the same every time."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

SEED = 20


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def overwritten(path: Path) -> None:
    """In place, from the middle on: whoever has it mapped sees it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(random.Random(SEED).randbytes(size - size // 2))


def flipped(path: Path) -> None:
    """One bit in the middle, where nothing but its own checksum can tell."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (found,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([found ^ 1]))


def flipped_everywhere(path: Path) -> None:
    """One bit of every 4 KiB."""
    content, chance = bytearray(path.read_bytes()), random.Random(SEED)
    for start in range(0, len(content), 4096):
        content[min(start + chance.randrange(4096), len(content) - 1)] ^= 1 << chance.randrange(8)
    with path.open("r+b") as file:
        file.write(content)


def index_garbage(path: Path) -> None:
    """Both ends, where a directory of contents may be."""
    with path.open("r+b") as file:
        file.write(random.Random(SEED).randbytes(64))
        file.seek(-64, os.SEEK_END)
        file.write(random.Random(SEED + 1).randbytes(64))


def replaced_by_garbage(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(random.Random(SEED).randbytes(size))


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


TO_CONTENT: tuple[Callable[[Path], None], ...] = (
    truncated,
    emptied,
    overwritten,
    flipped,
    flipped_everywhere,
    index_garbage,
)
TO_KIND: tuple[Callable[[Path], None], ...] = (
    replaced_by_garbage,
    replaced_by_fifo,
    replaced_by_folder,
    replaced_by_loop,
)


def name_of(harm: Callable[[Path], None]) -> str:
    return harm.__name__


def force(harm: Callable[[Path], None], path: Path) -> None:
    """Packs are read-only once written."""
    path.chmod(0o600)
    harm(path)
