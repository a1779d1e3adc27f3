"""How many ranks a run has, and on how many nodes: one answer, before it starts, for whoever asks.

A flag outranks the configuration, which outranks accelerate's file; the variables of SimpleTuner's launcher stand in
for the configuration's keys, but a number of ranks among them counts only where that file has none, as SimpleTuner has
it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError

RANKS, NODES, ACCELERATE_FILE = "TRAINING_NUM_PROCESSES", "TRAINING_NUM_MACHINES", "ACCELERATE_CONFIG_PATH"

_VARIABLES = {
    "accelerate_config": ACCELERATE_FILE,
    "accelerate_extra_args": "ACCELERATE_EXTRA_ARGS",
    "num_processes": RANKS,
    "num_machines": NODES,
    "dynamo_backend": "TRAINING_DYNAMO_BACKEND",
}
LAUNCH_OPTIONS = tuple(_VARIABLES)
"""What is said to the launcher, and not to SimpleTuner's parser."""


@dataclass(frozen=True)
class Job:
    ranks: int = 1
    """Of all nodes."""
    nodes: int = 1
    asked: bool = False
    """Were they asked for by name, so that accelerate's file doesn't decide?"""


def launch_variables(
    flags: Mapping[str, str], values: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str]:
    """What flags and the configuration add to the environment of the launcher."""
    added = {}
    for name, variable in _VARIABLES.items():
        value = flags.get(name)
        if value is None and values.get(name) not in (None, "") and variable not in environment:
            value = str(values[name])
        if value is not None:
            added[variable] = os.path.expanduser(value) if variable == ACCELERATE_FILE else value
    return added


def job_of(added: Mapping[str, str], environment: Mapping[str, str]) -> Job:
    """``added``: what ``launch_variables`` gave for it. Raises UsageError for what is no number."""
    everything = {**environment, **added}
    file = accelerate_text(everything)
    nodes = everything.get(NODES) or said_in(file, "num_machines") or "1"
    ranks = added.get(RANKS) or said_in(file, "num_processes") or everything.get(RANKS) or "1"
    return Job(_count(ranks, "num_processes", "ranks"), _count(nodes, "num_machines", "nodes"), RANKS in added)


def accelerate_file(environment: Mapping[str, str]) -> Path | None:
    """accelerate's configuration: the one that is named, there or not, or the user's own."""
    named = environment.get(ACCELERATE_FILE)
    if named:
        return Path(named).expanduser()
    home = environment.get("HF_HOME") or os.path.join(environment.get("HOME", "~"), ".cache", "huggingface")
    own = os.path.join(home, "accelerate", "default_config.yaml")
    return Path(own) if os.path.isfile(own) else None


def accelerate_text(environment: Mapping[str, str]) -> str:
    """What it says; nothing where it is not there, which only a launch has to refuse."""
    file = accelerate_file(environment)
    if file is None or not os.path.isfile(file):
        return ""
    return file.read_text(encoding="utf-8", errors="replace")


def said_in(file: str, key: str) -> str | None:
    """The value of a key of accelerate's file."""
    found = re.search(rf"(?m)^{key}:[ \t]*['\"]?([\w.:-]+)", file)
    return found.group(1) if found and found.group(1).lower() != "null" else None


def _count(text: str, name: str, of: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name}: {text!r} is not a number of {of}", remedy="use a whole number from 1")
    return int(text)
