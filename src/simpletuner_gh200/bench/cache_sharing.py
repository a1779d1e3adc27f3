"""What ranks hold together, by Pss, which counts shared pages once; and what one rank holds beyond the payload."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.cache_memory import make_latents
from simpletuner_gh200.bench.ranks import answer, ranks
from simpletuner_gh200.cache.service import Caches, Wanted
from simpletuner_gh200.memory.sharing import NodeGroup

SHAPE = (16, 128, 128)
PAYLOAD = 16 * 128 * 128 * 2


def measure_sharing(folder: Path, count: int) -> dict[str, Any]:
    """``held_ratio`` of one rank, ``pss_ratio`` of two; every rank has read every entry once."""
    make_latents(folder / "latents", SHAPE, count)
    alone, together = (_held(folder, world) for world in (1, 2))
    return {"held_ratio": alone / (count * PAYLOAD), "pss_ratio": together / (count * PAYLOAD)}


def _held(folder: Path, world: int) -> int:
    with ranks(__name__, folder / "latents", world, folder) as started:
        for rank in started:
            rank.ask("read everything")  # only when all have is a page shared by all
        return sum(rank.ask("report") for rank in started)


def be_a_rank(folder: str) -> None:
    from simpletuner_gh200.cache.fill import cache_files, load_file

    paths = [path for path, _ in cache_files(folder)]
    load_file(paths[0])  # torch's own first-use memory is not ours
    before = _pss()
    caches = Caches([Wanted("latents", "vae", folder)], allowed=None, group=NodeGroup.from_environment("bench"))
    caches.fill()
    table = caches.tables["latents"]

    def step(what: str) -> int:
        if what == "read everything":
            while table.find_all(paths) is None:  # the other rank may still be at its part
                time.sleep(0.05)
            for path in paths:
                table.get(path).sum()
        return _pss() - before

    answer(step)
    caches.close()


def _pss() -> int:
    """Of shared memory and of memory without a file: libraries are shared with whoever else runs on this machine."""
    total, counted = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            first, *rest = line.split(maxsplit=5)
            if "-" in first and not first.endswith(":"):
                name = rest[4].strip() if len(rest) > 4 else ""
                counted = not name or name.startswith(("[", "/memfd:"))
            elif counted and first == "Pss:":
                total += int(rest[0]) * 1024
    return total


if __name__ == "__main__":
    be_a_rank(sys.argv[1])
