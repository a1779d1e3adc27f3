"""Folders, images and memory figures for the store's tests."""

from __future__ import annotations

import gc
import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.report import StagingReport
from simpletuner_gh200.store.staging import StagingRequest, stage
from simpletuner_gh200.units import GIB


def image(kind: str = "PNG", size: int = 16, shade: int = 7) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 40, 200)).save(out, kind)
    return out.getvalue()


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def roomy() -> HostMemory:
    return HostMemory(total=64 * GIB, free=32 * GIB, available=32 * GIB, limit="MemAvailable")


def staged(folder: Path, **settings: object) -> tuple[StagedDataset, StagingReport]:
    settings.setdefault("workers", 2)
    settings.setdefault("max_corruption_rate", 1.0)
    memory, report = stage(StagingRequest(folder, **settings), host=roomy)  # type: ignore[arg-type]
    dataset = StagedDataset(memory)
    memory.close()
    return dataset, report


def open_memfds() -> int:
    """How many memfds of ours this process holds, those of earlier tests collected first."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:gh200" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def as_nobody(work: Callable[[], None], folder: Path) -> int:
    """Exit code of ``work`` in a child without root's right to read everything; 0 where it raised nothing."""
    for opened in (folder, *folder.parents[:2]):
        opened.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
