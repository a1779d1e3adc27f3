"""A ``cache_dir`` with one packed cache, for trials of ``gh200 cache`` that need no run."""

from __future__ import annotations

from pathlib import Path

import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.pack_folder import PackFolder
from simpletuner_gh200.cache.pack_place import folder_for
from simpletuner_gh200.cache.table import Table

ENTRIES = 24
FLOATS = 20_000


def write_packs(folder: Path) -> tuple[Path, Path]:
    """(cache_dir, the pack in it); SimpleTuner's files are in ``folder / "vae"``."""
    source, root = folder / "vae", folder / "cache"
    source.mkdir(parents=True)
    paths = [str(source / f"{number:02d}.pt") for number in range(ENTRIES)]
    random = torch.Generator().manual_seed(7)
    for path in paths:
        torch.save(torch.randn(FLOATS, generator=random), path)
    table = Table("vae-x", Control.create(64, label="x", shared=False))
    assert all(take_in(table, path) for path in paths)
    packs = PackFolder(folder_for(root, "vae-x", str(source)))
    packs.make(str(source))
    assert packs.save(table, paths)
    table.close()
    (pack,) = packs.packs()
    return root, pack
