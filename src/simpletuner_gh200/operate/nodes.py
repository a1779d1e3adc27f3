"""Several nodes: where one launcher stands among those of its job, and how that is said to accelerate and torchrun.

Each node runs one launcher, which starts that node's ranks. The words are accelerate's (``--machine_rank``,
``--main_process_ip``, ``--main_process_port``), as they stand in ``accelerate_extra_args``; torchrun, which starts
ranks where there is no GPU, has its own for the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from simpletuner_gh200.config.files import take
from simpletuner_gh200.config.job import Job, said_in
from simpletuner_gh200.errors import UsageError

PORT = "29500"
"""Where the first rank listens unless told otherwise; accelerate's own choice too."""

AFFINITY = "--enable_cpu_affinity"
"""Each rank on the cores, and so the memory, next to its own GPU. accelerate takes it as a flag alone: the key of that
name in its file is read and forgotten."""


@dataclass(frozen=True)
class Place:
    """One launcher's place. ``rank`` and ``address`` are None where nothing says them."""

    nodes: int
    ranks: int
    """Of the whole job."""
    rank: int | None
    address: str | None
    port: str

    @property
    def ranks_here(self) -> int:
        return self.ranks // self.nodes

    def problem(self) -> UsageError | None:
        """Why a job of several nodes can't start from here."""
        if self.ranks > 1 and self.ranks % self.nodes:
            return UsageError(
                f"num_processes {self.ranks} over num_machines {self.nodes}: every node has the same number of ranks",
                remedy=f"use a multiple of {self.nodes}; num_processes counts the ranks of all nodes",
            )
        said = {"machine_rank": self.rank, "main_process_ip": self.address}
        absent = [name for name, value in said.items() if value is None]
        if self.nodes == 1 or not absent:
            return None
        return UsageError(
            f"num_machines is {self.nodes}, and nothing says the {' and the '.join(absent)} of this launcher",
            remedy="submit the train.sbatch of `gh200 init --slurm`, or start each node with ACCELERATE_EXTRA_ARGS="
            '"--machine_rank=NUMBER_FROM_0 --main_process_ip=FIRST_NODE"',
        )

    def for_torchrun(self) -> list[str]:
        if self.nodes == 1:
            return ["--standalone", f"--nproc_per_node={self.ranks}"]
        return [
            f"--nnodes={self.nodes}",
            f"--node_rank={self.rank or 0}",
            f"--nproc_per_node={self.ranks_here}",
            f"--master_addr={self.address or 'localhost'}",
            f"--master_port={self.port}",
        ]


def place_of(job: Job, extra: Sequence[str], file: str = "") -> tuple[Place, list[str]]:
    """The place, and those of the extra words that are not about it. ``file``: what accelerate's file says."""
    rank, rest = take(extra, "machine_rank", "node_rank")
    address, rest = take(rest, "main_process_ip", "master_addr")
    port, rest = take(rest, "main_process_port", "master_port")
    rank = rank or said_in(file, "machine_rank")
    number = None if rank is None else _machine_rank(rank, job.nodes)
    return Place(
        job.nodes,
        job.ranks,
        number,
        address or said_in(file, "main_process_ip"),
        port or said_in(file, "main_process_port") or PORT,
    ), rest


def wants_affinity(file: str) -> bool:
    return re.search(r"(?m)^enable_cpu_affinity:[ \t]*(?i:true|yes|on)[ \t]*(?:#.*)?$", file) is not None


def _machine_rank(text: str, nodes: int) -> int:
    if not text.isdecimal() or int(text) >= nodes:
        raise UsageError(f"machine_rank: {text!r} is not that of one of {nodes} nodes", remedy=f"use 0 to {nodes - 1}")
    return int(text)
