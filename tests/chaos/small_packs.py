"""A ``cache_dir`` with one packed cache, for trials of ``gh200 cache`` that need no run."""

from __future__ import annotations

from pathlib import Path

import torch

from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.pack_place import PackPlace, folder_for
from simpletuner_gh200.held.packs import PackFolder

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
    cache = HeldCache.alone("vae-x")
    Filler(cache).fill(paths)
    packs = PackFolder(folder_for(root, "vae-x", str(source)))
    PackPlace.make(packs.folder, str(source))
    assert packs.save(cache)
    cache.close()
    (pack,) = packs.folder.glob("*.pack")
    return root, pack
