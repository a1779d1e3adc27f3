"""What ranks hold together, by Pss, which counts shared pages once: of a staged dataset, and of a cache.

Ranks are interpreters of their own, started with this module as their program. Each reads everything when it is handed
a line, then answers with what it holds when it is handed another: only when all have read is a page shared by all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from simpletuner_gh200.bench.samples import make_cache_files, make_files
from simpletuner_gh200.config.environment import for_child
from simpletuner_gh200.memory.sharing import NodeGroup

DATASET_RANKS = 4
LATENT_SHAPE = (16, 128, 128)
LATENT_BYTES = 16 * 128 * 128 * 2


def measure_dataset(folder: Path, size: int, count: int) -> dict[str, Any]:
    make_files(folder / "data", size, count)
    held = _held("dataset", folder / "data", DATASET_RANKS)
    return {"pss_ratio": held / (size * count), "ranks": DATASET_RANKS, "dataset_bytes": size * count}


def measure_cache(folder: Path, count: int) -> dict[str, Any]:
    """``held_ratio`` of one rank, ``sharing/pss_ratio`` of two."""
    make_cache_files(folder / "latents", LATENT_SHAPE, count)
    alone, together = (_held("cache", folder / "latents", world) for world in (1, 2))
    whole = count * LATENT_BYTES
    return {"held_ratio": alone / whole, "sharing": {"pss_ratio": together / whole}}


def _held(kind: str, data: Path, world: int) -> int:
    with ExitStack() as ending:
        ranks = [ending.enter_context(_start(kind, data, rank, world)) for rank in range(world)]
        try:
            for rank in ranks:
                _ask(rank)
            return sum(map(_ask, ranks))
        except BaseException:
            for rank in ranks:  # one that died leaves the others waiting for it
                rank.kill()
            raise


def _start(kind: str, data: Path, rank: int, world: int) -> subprocess.Popen[str]:
    place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(os.getpid())}
    environment = for_child(place)
    command = [sys.executable, "-m", __name__, kind, str(data)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(rank: subprocess.Popen[str]) -> int:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    return int(rank.stdout.readline())


# -- in the rank -------------------------------------------------------------------------------------
# Each kind imports what it measures when it starts: what the other needs would count as held.


def _answer(read_everything: Callable[[], None], held: Callable[[], int]) -> None:
    """Until nobody asks any more. Standard output is the pipe to whoever measures."""
    for number, _line in enumerate(sys.stdin):
        if number == 0:
            read_everything()
        sys.stdout.write(f"{held()}\n")
        sys.stdout.flush()


def _be_a_dataset_rank(folder: Path) -> None:
    from simpletuner_gh200.config.blocks import InMemorySettings
    from simpletuner_gh200.held.files import Forgotten, HeldFiles
    from simpletuner_gh200.held.shelf import Board
    from simpletuner_gh200.held.staging import stage

    group = NodeGroup.from_environment("bench")
    group.join(60)
    if group.is_leader:
        segment, _report = stage(folder, InMemorySettings(verify="none", num_workers=2), tick=group.beat)
        board = Board.create(group.local_world_size)
        dataset = HeldFiles(board, 0, Forgotten.alone())
        dataset.publish(segment)
        group.share("data", board.fd)
    else:
        _, (fd,) = group.receive("data")
        dataset = HeldFiles(Board.attach(fd), group.local_rank, Forgotten.alone())

    def read_everything() -> None:
        for parent, _folders, names in os.walk(folder):
            for name in names:
                assert dataset.view(os.path.join(parent, name)) is not None

    _answer(read_everything, lambda: _pss(libraries=True))  # four interpreters are little beside a dataset


def _be_a_cache_rank(folder: Path) -> None:
    from simpletuner_gh200.held.caches import Caches, Wanted
    from simpletuner_gh200.held.fill import load_file
    from simpletuner_gh200.held.listing import cache_files

    paths = list(cache_files(str(folder)).paths())
    load_file(paths[0])  # torch's own first-use memory is not ours
    before = _pss(libraries=False)
    wanted = [Wanted("latents", "vae", str(folder))]
    caches = Caches(wanted, allowed=None, group=NodeGroup.from_environment("bench"))
    caches.fill()
    cache = caches.caches["latents"]

    def read_everything() -> None:
        while cache.find_all(paths) is None:  # the other rank may still be at its part
            time.sleep(0.05)
        for path in paths:
            cache.find_all([path])[0].payload.sum()  # type: ignore[index]  # where it is held: hits are copies

    _answer(read_everything, lambda: _pss(libraries=False) - before)
    caches.close()


def _pss(*, libraries: bool) -> int:
    """Of this process; without libraries, which are shared with whoever else runs here: of memory and memfds alone."""
    maps = psutil.Process().memory_maps()
    return sum(one.pss for one in maps if libraries or one.path.startswith(("[", "/memfd:")))


if __name__ == "__main__":
    {"dataset": _be_a_dataset_rank, "cache": _be_a_cache_rank}[sys.argv[1]](Path(sys.argv[2]))
