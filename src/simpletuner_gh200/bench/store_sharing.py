"""Four ranks over one staged dataset: what they hold together, by Pss, which counts shared pages once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.ranks import answer, ranks
from simpletuner_gh200.bench.store_files import make_files
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.shared_memory import receive_memory, share_memory
from simpletuner_gh200.store.staging import StagingRequest, stage

RANKS = 4


def measure_sharing(folder: Path, size: int, count: int) -> dict[str, Any]:
    """Every rank reads every file; none ends before all have reported."""
    make_files(folder / "data", size, count)
    with ranks(__name__, folder / "data", RANKS, folder) as started:
        for rank in started:
            rank.ask("read everything")
        pss = sum(rank.ask("report") for rank in started)
    return {"pss_ratio": pss / (size * count), "ranks": RANKS, "dataset_bytes": size * count}


def be_a_rank(folder: Path) -> None:
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
            _read_all(dataset, folder)
        return own_pss()

    answer(step)


def _read_all(dataset: StagedDataset, folder: Path) -> None:
    for parent, _folders, names in os.walk(folder):
        for name in names:
            assert dataset.view(os.path.join(parent, name)) is not None


def own_pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]))
