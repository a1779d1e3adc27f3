"""A disk of a stated speed: a loop device that the kernel slows down where it lets us, writers that wait elsewhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.units import MIB

DIRTY = 64 * MIB
"""Pages that may wait to be written: a small share of a checkpoint, as of a large one on a large node."""

_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_PER_DEVICE = Path("/sys/class/bdi")


@dataclass(frozen=True)
class SlowDisk:
    folder: Path
    how: str
    rate: float | None
    """Bytes per second that writers are to keep to by themselves; None where the disk sees to it."""


@contextmanager
def slow_disk(folder: Path, rate: float, size: int) -> Iterator[SlowDisk]:
    """``folder`` is made. ``rate``: bytes per second; ``size``: bytes that fit."""
    folder.mkdir(parents=True)
    shown = f"{rate / 1e6:.0f} MB/s"
    with ExitStack() as mounted:
        try:
            _mount(mounted, folder, int(rate), size)
            disk = SlowDisk(folder, f"ext4 on a loop device, held to {shown} by blkio, 64 MiB of dirty pages", None)
        except (OSError, subprocess.CalledProcessError):
            mounted.close()
            disk = SlowDisk(folder, f"no loop device here: stock's saving and our drainer are held to {shown}", rate)
        yield disk


def _mount(mounted: ExitStack, folder: Path, rate: int, size: int) -> None:
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        mounted.callback(image.unlink)
        os.truncate(file.fileno(), size)
    device = _ask("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    mounted.callback(_ask, "losetup", "--detach", device)
    number = Path("/sys/block", Path(device).name, "dev").read_text(encoding="ascii").strip()
    _ask("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
    _ask("mount", device, str(folder))
    mounted.callback(_ask, "umount", str(folder))
    for name, value in (("strict_limit", 1), ("max_bytes", DIRTY)):
        (_PER_DEVICE / number / name).write_text(f"{value}\n", encoding="ascii")
    _THROTTLE.write_text(f"{number} {rate}\n", encoding="ascii")
    mounted.callback(_THROTTLE.write_text, f"{number} 0\n", encoding="ascii")


def _ask(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
