"""What ranks hold together, by Pss, which counts shared pages once: of a staged dataset, and of a cache.

Ranks are interpreters of their own, started with this module as their program: each takes a step when asked, answers
with a number, and ends when nobody asks any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from simpletuner_gh200.bench.samples import make_files, make_latents
from simpletuner_gh200.config.environment import for_child
from simpletuner_gh200.memory.sharing import NodeGroup

Kind = Literal["dataset", "cache"]

DATASET_RANKS = 4
LATENT_SHAPE = (16, 128, 128)
LATENT_BYTES = 16 * 128 * 128 * 2


def measure_dataset(folder: Path, size: int, count: int) -> dict[str, Any]:
    """Every rank reads every file; none ends before all have reported."""
    make_files(folder / "data", size, count)
    held = _held("dataset", folder / "data", DATASET_RANKS, folder)
    return {"pss_ratio": held / (size * count), "ranks": DATASET_RANKS, "dataset_bytes": size * count}


def measure_cache(folder: Path, count: int) -> dict[str, Any]:
    """``held_ratio`` of one rank, ``pss_ratio`` of two; every rank has read every entry once."""
    make_latents(folder / "latents", LATENT_SHAPE, count)
    alone, together = (_held("cache", folder / "latents", world, folder) for world in (1, 2))
    return {"held_ratio": alone / (count * LATENT_BYTES), "pss_ratio": together / (count * LATENT_BYTES)}


def _held(kind: Kind, data: Path, world: int, work: Path) -> int:
    with _ranks(kind, data, world, work) as started:
        for rank in started:
            rank.ask("read everything")  # only when all have is a page shared by all
        return sum(rank.ask("report") for rank in started)


class Rank:
    def __init__(self, kind: Kind, data: Path, rank: int, world: int, work: Path) -> None:
        place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(os.getpid())}
        environment = for_child({**place, "XDG_RUNTIME_DIR": "", "TMPDIR": str(work)})
        command = [sys.executable, "-m", __name__, kind, str(data)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, step: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextmanager
def _ranks(kind: Kind, data: Path, world: int, work: Path) -> Iterator[list[Rank]]:
    """``world`` of them; none ends before the block does."""
    started = [Rank(kind, data, rank, world, work) for rank in range(world)]
    try:
        yield started
    finally:
        for rank in started:
            rank.end()


# -- in the rank -------------------------------------------------------------------------------------
# Each kind imports what it measures when it starts: what the other needs would count as held.


def _answer(step: Callable[[str], int]) -> None:
    """Do what is asked until nobody asks any more. Standard output is the pipe to whoever measures."""
    for line in sys.stdin:
        sys.stdout.write(f"{step(line.strip())}\n")
        sys.stdout.flush()


def _be_a_dataset_rank(folder: Path) -> None:
    from simpletuner_gh200.store.reader import StagedDataset
    from simpletuner_gh200.store.shared_memory import receive_memory, share_memory
    from simpletuner_gh200.store.staging import StagingRequest, stage

    group = NodeGroup.from_environment("bench")
    group.join(60)
    if group.is_leader:
        memory, _report = stage(StagingRequest(folder, verify="none", workers=2), tick=group.beat)
        share_memory(group, "data", memory)
    else:
        memory = receive_memory(group, "data")
    dataset = StagedDataset(memory)

    def step(what: str) -> int:
        if what == "read everything":
            for parent, _folders, names in os.walk(folder):
                for name in names:
                    assert dataset.view(os.path.join(parent, name)) is not None
        return _pss_of_everything()

    _answer(step)


def _be_a_cache_rank(folder: Path) -> None:
    from simpletuner_gh200.cache.fill import load_file
    from simpletuner_gh200.cache.listing import cache_files
    from simpletuner_gh200.cache.service import Caches, Wanted

    paths = list(cache_files(str(folder)).paths())
    load_file(paths[0])  # torch's own first-use memory is not ours
    before = _pss_without_libraries()
    wanted = [Wanted("latents", "vae", str(folder))]
    caches = Caches(wanted, allowed=None, group=NodeGroup.from_environment("bench"))
    caches.fill()
    table = caches.tables["latents"]

    def step(what: str) -> int:
        if what == "read everything":
            while table.find_all(paths) is None:  # the other rank may still be at its part
                time.sleep(0.05)
            for path in paths:
                table.get(path).sum()
        return _pss_without_libraries() - before

    _answer(step)
    caches.close()


def _pss_of_everything() -> int:
    """The interpreter included: four of them are little beside a dataset."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _pss_without_libraries() -> int:
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
    {"dataset": _be_a_dataset_rank, "cache": _be_a_cache_rank}[sys.argv[1]](Path(sys.argv[2]))
