"""How many ranks a run has, on how many nodes, and where this launcher stands among them: one answer for all who ask.

A flag outranks the configuration, which outranks accelerate's file; the variables of SimpleTuner's launcher, sourced
ones above those of this process, stand in for the configuration's keys, but a number of ranks among them counts only
where that file has none, as SimpleTuner has it. Each node runs one launcher, which starts that node's ranks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import huggingface_home
from simpletuner_gh200.config.files import take
from simpletuner_gh200.errors import Problem, UsageError

RANKS, NODES = "TRAINING_NUM_PROCESSES", "TRAINING_NUM_MACHINES"
ACCELERATE_FILE, EXTRA_ARGUMENTS = "ACCELERATE_CONFIG_PATH", "ACCELERATE_EXTRA_ARGS"
_VARIABLES = {
    "accelerate_config": ACCELERATE_FILE,
    "accelerate_extra_args": EXTRA_ARGUMENTS,
    "num_processes": RANKS,
    "num_machines": NODES,
    "dynamo_backend": "TRAINING_DYNAMO_BACKEND",
}
LAUNCH_OPTIONS = tuple(_VARIABLES)
"""What is said to the launcher, and not to SimpleTuner's parser."""

PORT = "29500"
"""Where the first rank listens unless told otherwise; accelerate's own choice too."""


@dataclass(frozen=True)
class Job:
    """Of one rank on one node, unless something says otherwise."""

    ranks: int = 1
    """Of all nodes."""
    nodes: int = 1
    by_name: bool = False
    """Were the ranks asked for by flag or key, so that accelerate's file doesn't decide?"""
    node_rank: int | None = None
    """This launcher's among those of its job; it and ``address`` are None where nothing says them."""
    address: str | None = None
    port: str = PORT
    affinity: bool = False
    """Does accelerate's file want each rank on the cores, and so the memory, next to its own GPU?"""
    accelerate_file: Path | None = None
    """The one that is named, there or not, or the user's own."""
    extra: tuple[str, ...] = ()
    """Further words for accelerate."""
    other_extra: tuple[str, ...] = ()
    """Those of them that don't say where this launcher stands."""
    added: Mapping[str, str] = field(default_factory=dict)
    """What flags and the configuration add to the environment of the launcher."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All that the launcher goes by, ``added`` included."""

    @property
    def first_node(self) -> bool:
        return self.nodes == 1 or self.node_rank == 0

    def missing_file(self) -> Problem | None:
        if self.accelerate_file is None or os.path.isfile(self.accelerate_file):
            return None
        named = self.environment[ACCELERATE_FILE]
        return Problem("accelerate_config", f"{named!r}: no such file", "correct the path, or leave it out")

    def unplaced(self) -> UsageError | None:
        """Why a job of several nodes can't start from here, although nothing is wrong with the configuration."""
        if self.ranks > 1 and self.ranks % self.nodes:
            return UsageError(
                f"num_processes {self.ranks} over num_machines {self.nodes}: every node has the same number of ranks",
                remedy=f"use a multiple of {self.nodes}; num_processes counts the ranks of all nodes",
            )
        place = {"machine_rank": self.node_rank, "main_process_ip": self.address}
        absent = [name for name, value in place.items() if value is None]
        if self.nodes == 1 or not absent:
            return None
        return UsageError(
            f"num_machines is {self.nodes}, and nothing says the {' and the '.join(absent)} of this launcher",
            remedy="submit the train.sbatch of `gh200 init --slurm`, or start each node with ACCELERATE_EXTRA_ARGS="
            '"--machine_rank=NUMBER_FROM_0 --main_process_ip=FIRST_NODE"',
        )


def read_job(
    flags: Mapping[str, str], values: Mapping[str, Any], environment: Mapping[str, str], problems: list[Problem]
) -> Job:
    """``environment``: with what SimpleTuner sources. What is written wrongly is a problem, and its default holds."""
    added = _added(flags, values, environment)
    everything = {**environment, **added}
    path = _accelerate_file(everything)
    file = read_accelerate_file(path) if path is not None else {}
    extra, place, rest = _extra(everything.get(EXTRA_ARGUMENTS, ""), problems)
    nodes = place["num_machines"] or everything.get(NODES) or file.get("num_machines") or "1"
    ranks = added.get(RANKS) or file.get("num_processes") or everything.get(RANKS) or "1"
    node_count = _number(nodes, "num_machines", "a number of nodes", problems)
    node_rank = place["machine_rank"] or file.get("machine_rank")
    return Job(
        ranks=_number(ranks, "num_processes", "a number of ranks", problems),
        nodes=node_count,
        by_name=RANKS in added,
        node_rank=_node_rank(node_rank, node_count, problems) if node_rank else None,
        address=place["main_process_ip"] or file.get("main_process_ip"),
        port=place["main_process_port"] or file.get("main_process_port") or PORT,
        affinity=file.get("enable_cpu_affinity", "").lower() in ("true", "yes", "on"),
        accelerate_file=path,
        extra=tuple(extra),
        other_extra=tuple(rest),
        added=added,
        environment=everything,
    )


def _added(flags: Mapping[str, str], values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    added = {}
    for name, variable in _VARIABLES.items():
        value = flags.get(name)
        if value is None and values.get(name) not in (None, "") and variable not in environment:
            value = str(values[name])
        if value is not None:
            added[variable] = os.path.expanduser(value) if variable == ACCELERATE_FILE else value
    return added


def _accelerate_file(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(ACCELERATE_FILE)
    if named:
        return Path(named).expanduser()
    if not (environment.get("HF_HOME") or environment.get("HOME")):
        return None  # nobody's environment: what is asked is not of a user
    own = huggingface_home(environment) / "accelerate" / "default_config.yaml"
    return own if os.path.isfile(own) else None


_LINE = re.compile(r"""(?m)^(\w+):[ \t]+(?:'([^'\n]*)'|"([^"\n]*)"|([^\s#'"][^\n]*?))[ \t]*(?:[ \t]#.*)?$""")


def read_accelerate_file(path: Path) -> dict[str, str]:
    """Its keys that have a plain value, which is all that is asked of it here; none where it is not there."""
    if not os.path.isfile(path):
        return {}
    content = path.read_text(encoding="utf-8", errors="replace")
    found = {line[1]: line[2] or line[3] or line[4] or "" for line in _LINE.finditer(content)}
    return {key: value for key, value in found.items() if value.lower() not in ("", "null", "~")}


_PLACES = {
    "num_machines": ("num_machines", "nnodes"),
    "machine_rank": ("machine_rank", "node_rank"),
    "main_process_ip": ("main_process_ip", "master_addr"),
    "main_process_port": ("main_process_port", "master_port"),
}
"""What a place is made of, in the words of accelerate and of torchrun."""


def _extra(text: str, problems: list[Problem]) -> tuple[list[str], dict[str, str | None], list[str]]:
    """The words, what they say of this launcher's place, and the others."""
    place: dict[str, str | None] = dict.fromkeys(_PLACES)
    try:
        rest = words = shlex.split(text)
        for name, spellings in _PLACES.items():
            place[name], rest = take(rest, *spellings)
    except ValueError as broken:
        problems.append(Problem("accelerate_extra_args", f"{text!r}: {broken}", "close the quotation"))
        return [], place, []
    except UsageError as bad:
        problems.append(Problem("accelerate_extra_args", bad.message, bad.remedy))
        return [], place, []
    return words, place, rest


def _number(text: str, name: str, what: str, problems: list[Problem]) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(Problem(name, f"{text!r} is not {what}", "use a whole number from 1"))
    return 1


def _node_rank(text: str, nodes: int, problems: list[Problem]) -> int | None:
    if text.isdecimal() and int(text) < nodes:
        return int(text)
    problems.append(Problem("machine_rank", f"{text!r} is not that of one of {nodes} nodes", f"use 0 to {nodes - 1}"))
    return None
