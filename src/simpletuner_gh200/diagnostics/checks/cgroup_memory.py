"""GH306: is this process in a cgroup that allows less than the machine has?"""

from __future__ import annotations

from simpletuner_gh200.diagnostics.check import Check, Finding, passed, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.host import cgroup_rooms, read_meminfo
from simpletuner_gh200.units import format_bytes

MOST = 0.9
"""A limit above this share of the machine is as good as none."""


def _run(context: Context) -> Finding:
    total = read_meminfo(context.root)["MemTotal"]
    rooms = [(limit, name, room) for name, room, limit in cgroup_rooms(context.root)]
    if not rooms or min(rooms)[0] >= MOST * total:
        return passed("no memory limit below the machine's own")
    limit, name, room = min(rooms)
    return warned(
        f"cgroup {name} allows {format_bytes(limit)} of the machine's {format_bytes(total)}, {format_bytes(room)} left",
        "start the container with more (docker run --memory, Slurm --mem=0, Kubernetes limits.memory); shared memory "
        "and cached files count against it",
    )


CHECK = Check(
    code="GH306",
    what="memory limit of the container",
    why="Beyond it the kernel kills the run, however much the machine still has.",
    run=_run,
)
