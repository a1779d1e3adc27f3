"""Starting again: packs against reading their bytes and doing nothing, and against loading every cache file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.cache_memory import make_latents
from simpletuner_gh200.bench.measure import interleaved
from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import fill
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.table import Table

SHAPE = (16, 128, 128)
_HOT = 4 << 20


def measure_warm_start(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """``vs_pt_files``: the start without packs, which fills from SimpleTuner's files on as many threads."""
    paths = make_latents(folder / "latents", SHAPE, count)
    packs = PackFolder(folder / "packs")
    packs.make(str(folder))
    first = _table(count)
    fill(first, paths, workers=2)
    packs.save(first, paths)
    first.close()
    hot = bytearray(_HOT)

    def load() -> None:
        table = _table(count)
        loaded = PackFolder(packs.folder).load(table, copy=False, workers=os.cpu_count() or 1)
        assert loaded.entries == count, loaded
        table.close()

    def fill_from_files() -> None:
        table = _table(count)
        fill(table, paths, workers=os.cpu_count() or 1)
        table.close()

    candidates = {
        "packs": load,
        "read": lambda: _read(packs.packs(), hot),
        "pt": fill_from_files,
        "torch_load": lambda: _load(paths),
    }
    seconds = interleaved(candidates, repeats=repeats)
    return {
        "vs_read_limit": seconds["read"] / seconds["packs"],
        "vs_pt_files": seconds["pt"] / seconds["packs"],
        "vs_torch_load": seconds["torch_load"] / seconds["packs"],
        "gb_per_s": sum(path.stat().st_size for path in packs.packs()) / seconds["packs"] / 1e9,
    }


def _table(count: int) -> Table:
    return Table("warm", Control.create(count + 256, label="warm", shared=False), look_for_nan=True)


def _read(paths: list[Path], hot: bytearray) -> None:
    view = memoryview(hot)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [view]):
            pass
        os.close(fd)


def _load(paths: list[str]) -> None:
    """Every file through ``torch.load``, kept in memory, and nothing else."""
    import torch

    kept = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    assert len(kept) == len(paths)
