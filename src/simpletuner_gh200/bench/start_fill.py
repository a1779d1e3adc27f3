"""Filling by itself: how near it comes to what reading and unpacking cost alone, and what it costs a training step."""

from __future__ import annotations

import gzip
import io
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.suite import interleaved
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import fill
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.table import Table
from simpletuner_gh200.cache.tensor_files import FileTaker, Shapes
from simpletuner_gh200.held.bulk import TAKEN
from simpletuner_gh200.memory.background import BackgroundJob
from simpletuner_gh200.memory.pace import Effort, Pace

KINDS = {"gzip_20KB": (10 * 1024, True), "zip_128KB": (64 * 1024, False), "zip_512KB": (256 * 1024, False)}
"""Of bfloat16 tensors: numbers in each, and whether the file is gzipped."""
COUNTS = {"gzip_20KB": 1500, "zip_128KB": 600, "zip_512KB": 200}
STEPS = 20


def measure_fill(folder: Path, kind: str, count: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of one thread.

    ``vs_limit`` compares like with like: files taken apart and checked, kept by neither side. ``held_vs_limit`` is all
    of filling: it also puts every byte into fresh memory, which for large entries costs more than all the rest, and
    which the limit leaves out.
    """
    import torch

    numbers, gzipped = KINDS[kind]
    paths = make_cache_files(folder, numbers, count, gzipped=gzipped)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes = Shapes()
    _take_apart(paths[:1], shapes)  # the pickle is understood once in a cache of thousands of files
    try:
        candidates = {
            "limit": lambda: _limit(paths, gzipped),
            "taken": lambda: _take_apart(paths, shapes),
            "filled": lambda: _fill(paths, 1),
            "torch_load": lambda: _torch_load(paths[: max(count // 4, 1)], gzipped),
        }
        seconds = interleaved(candidates, repeats=repeats, clock=time.process_time)
    finally:
        torch.set_num_threads(threads)
    loaded = seconds["torch_load"] * count / max(count // 4, 1)
    return {
        "vs_limit": seconds["limit"] / seconds["taken"],
        "held_vs_limit": seconds["limit"] / seconds["filled"],
        "vs_torch_load": loaded / seconds["filled"],
        "us_per_entry": seconds["filled"] / count * 1e6,
    }


def measure_scaling(folder: Path, count: int, repeats: int) -> float:
    """Wall time of filling with one thread against two."""
    paths = make_cache_files(folder, KINDS["gzip_20KB"][0], count, gzipped=True)
    seconds = interleaved({"one": lambda: _fill(paths, 1), "two": lambda: _fill(paths, 2)}, repeats=repeats)
    return seconds["one"] / seconds["two"]


def measure_packs(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """CPU time per entry of 1 KB: all of them taken in and checked, and what opening alone costs."""
    paths = make_cache_files(folder / "files", 512, count, gzipped=True)
    packs = PackFolder(folder / "packs", "bench")
    packs.make(str(folder / "files"))
    first = _table(count)
    fill(first, paths, workers=1)
    packs.save(first, paths)
    first.close()

    def load() -> None:
        table = _table(count)
        loaded = PackFolder(packs.folder, "bench").load(table, workers=1)
        assert loaded.entries == count, loaded
        table.close()

    def open_only() -> None:
        index = PackFolder(packs.folder, "bench").open_index()
        assert len(index) == count
        index.close()

    seconds = interleaved({"load": load, "open": open_only}, repeats=repeats, clock=time.process_time)
    return {"us_per_entry": seconds["load"] / count * 1e6, "open_us_per_entry": seconds["open"] / count * 1e6}


def measure_step_slowdown(folder: Path, count: int, repeats: int, steps: int = STEPS) -> float:
    """How much longer a step of the demo's UNet on the CPU takes while a cache is filled in the background."""
    step = _training_step()
    paths = make_cache_files(folder, KINDS["gzip_20KB"][0], count, gzipped=True)
    alone, besides = [], []
    for _ in range(repeats):
        alone.append(_seconds(step, steps))
        with _filling(paths):
            besides.append(_seconds(step, steps))
    return statistics.median(besides) / statistics.median(alone) - 1


def make_cache_files(folder: Path, numbers: int, count: int, *, gzipped: bool) -> list[str]:
    """As SimpleTuner writes them: one pickle, content of its own each."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        out = io.BytesIO()
        torch.save(torch.randn(numbers).to(torch.bfloat16), out)
        path = folder / f"{number:05d}.pt"
        path.write_bytes(gzip.compress(out.getvalue()) if gzipped else out.getvalue())
        paths.append(str(path))
    return paths


def _limit(paths: list[str], gzipped: bool) -> None:
    """Read into one hot buffer, inflate where that is needed, CRC-32: with isal where it is installed."""
    try:
        from isal import isal_zlib as zlib
    except ImportError:
        import zlib  # type: ignore[no-redef]
    hot = memoryview(bytearray(1 << 20))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        content: Any = hot[: os.readv(fd, [hot])]
        os.close(fd)
        if gzipped:
            content = zlib.decompress(content, 31, 1 << 15)
        zlib.crc32(content)


def _take_apart(paths: list[str], shapes: Shapes) -> None:
    taker, at, some = FileTaker(shapes, look_for_nan=True), 0, 16
    while at < len(paths):
        taken = taker.take(paths[at : at + some])
        assert taker.counts[TAKEN] == len(taken)
        at, some = at + len(taken), min(2 * len(taken), 256)


def _torch_load(paths: list[str], gzipped: bool) -> None:
    import torch

    for path in paths:
        content = Path(path).read_bytes()
        torch.load(io.BytesIO(gzip.decompress(content) if gzipped else content), weights_only=True)


def _fill(paths: list[str], workers: int) -> None:
    table = _table(len(paths))
    fill(table, paths, workers=workers)
    assert table.statistics.published.value == len(paths), table.report()
    table.close()


def _table(count: int) -> Table:
    return Table("bench", Control.create(count + 256, label="bench", shared=False), look_for_nan=True)


def _training_step() -> Callable[[], None]:
    import torch

    from simpletuner_gh200.demo.tiny_model import tiny_unet

    unet = tiny_unet()
    latents, text = torch.randn(2, 4, 16, 16), torch.randn(2, 77, 64)
    added = {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)}

    def step() -> None:
        unet(latents, 500, text, added_cond_kwargs=added).sample.square().mean().backward()

    step()
    return step


def _seconds(step: Callable[[], None], steps: int) -> float:
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.fmean(taken)


@contextmanager
def _filling(paths: list[str]) -> Iterator[None]:
    """Filling in the background as a run does it, again and again until the block ends."""
    begun = threading.Event()

    def work(pace: Pace, effort: Effort) -> None:
        while not pace.ended:
            table = _table(len(paths))
            begun.set()
            fill(table, paths, workers=effort.threads, pace=pace)
            table.close()

    job = BackgroundJob(work, name="gh200-bench-fill")
    job.start()
    begun.wait()
    try:
        yield
    finally:
        job.stop()
