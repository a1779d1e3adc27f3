"""Four ranks over one staged dataset: what they hold together, by Pss, which counts shared pages once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.store_files import make_files
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.shared_memory import receive_memory, share_memory
from simpletuner_gh200.store.staging import StagingRequest, stage

RANKS = 4


def measure_sharing(folder: Path, size: int, count: int) -> dict[str, Any]:
    """Each rank is an interpreter of its own that reads every file; none ends before all have reported."""
    make_files(folder / "data", size, count)
    ranks = [_start(folder, rank) for rank in range(RANKS)]
    for rank in ranks:
        _ask(rank, "read everything")
    pss = sum(_ask(rank, "report") for rank in ranks)
    for rank in ranks:
        rank.communicate()
    return {"pss_ratio": pss / (size * count), "ranks": RANKS, "dataset_bytes": size * count}


def _ask(rank: subprocess.Popen[str], what: str) -> int:
    """The rank does its next step and answers with its Pss."""
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write(what + "\n")
    rank.stdin.flush()
    return int(json.loads(rank.stdout.readline())["pss"])


def _start(folder: Path, rank: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_PORT": str(os.getpid()),
        "XDG_RUNTIME_DIR": "",
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", "simpletuner_gh200.bench.store_sharing", str(folder / "data")]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def be_a_rank(folder: Path) -> None:
    group = NodeGroup.from_environment("bench")
    group.join(60)
    if group.is_leader:
        memory, _report = stage(StagingRequest(folder, verify="none", workers=2), tick=group.beat)
        share_memory(group, "data", memory)
    else:
        memory = receive_memory(group, "data")
    dataset = StagedDataset(memory)
    for line in sys.stdin:
        if line == "read everything\n":
            _read_all(dataset, folder)
        print(json.dumps({"pss": own_pss()}), flush=True)


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
