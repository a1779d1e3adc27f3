"""Every environment variable that the package goes by: its name, what it means, how its text is read.

Nobody else reads the environment. Settings that a configuration may overrule have their variables at their keys in
``config/blocks.py``, by the names given here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SWITCH = "SIMPLETUNER_GH200"
"""1: the extension is on in plain SimpleTuner processes. 0: stock SimpleTuner everywhere, also under `gh200 train`."""

HINTS = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"
"""Placement hints on or off, where the configuration says nothing."""

USE_UVM = "GH200_USE_UVM"
OVERSUBSCRIPTION_RATIO = "GH200_UVM_OVERSUBSCRIPTION_RATIO"
ACCESS_PATTERN = "GH200_UVM_ACCESS_PATTERN"
ACTIVATIONS = "GH200_ACTIVATIONS"
"""These four as their keys in ``gh200_optimizations``, which overrule them."""

TELEMETRY = "SIMPLETUNER_GH200_TELEMETRY"
"""Records of every step: 1 also of a run with nothing of ours on, 0 of none."""

PLACEMENT = "SIMPLETUNER_GH200_PLACEMENT"
"""Set before the ranks of a run with `memory: "auto"`, or in the first of a node: what was decided, as JSON."""

LIFELINE = "SIMPLETUNER_GH200_LIFELINE"
"""Set by `gh200 train` in every process of a run: the random part of the name of its socket."""

SUMMARY_FOLDER = "SIMPLETUNER_GH200_SUMMARY_DIR"
"""A folder in which each rank leaves its summary too; `gh200 train` gets it over the lifeline."""

DEBUG = "GH200_DEBUG"
"""Tracebacks, as `gh200 --debug` shows them."""

EMULATED = "GH200_EMULATED"
"""Set by our own tests: the driver is an emulation, and nothing measured on it means anything."""

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's own, in the order in which torch takes them."""

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Python's own. Without bytecode SimpleTuner takes a minute more to import: not for processes that import it anew."""

_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_NODE = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "GROUP_RANK",
)
"""What the ranks of one node have in common, and no others."""

DEBUG_PICTURES = "SIMPLETUNER_DEBUG_IMAGE_PREP"
"""SimpleTuner's own: it saves each picture while it prepares it."""

Environment = Mapping[str, str]


def text(name: str, environment: Environment | None = None) -> str:
    """What a variable holds; empty where it is not set. ``environment`` is this process's own unless given."""
    return (os.environ if environment is None else environment).get(name, "")


def flag_from_text(value: str) -> bool:
    """``1/true/yes/on`` and ``0/false/no/off``, as environment variables spell a switch."""
    lowered = value.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"{value!r} is not a switch; use 1 or 0")


def flag(name: str, environment: Environment | None = None) -> bool | None:
    """A switch; None where nobody set it. Raises ValueError for what is none."""
    found = text(name, environment)
    return flag_from_text(found) if found else None


def switched_on(environment: Environment | None = None) -> bool:
    return text(SWITCH, environment) == "1"


def switched_off(environment: Environment | None = None) -> bool:
    """Is the kill switch on?"""
    return text(SWITCH, environment) == "0"


# -- ranks, as torchrun, accelerate and MPI launchers describe them --------------------------------------


def rank(environment: Environment | None = None) -> int:
    """Among all ranks of the run."""
    return _first_number(("RANK",), 0, environment)


def local_rank(environment: Environment | None = None) -> int:
    """Among the ranks of this node."""
    return _first_number(_LOCAL_RANK, 0, environment)


def local_size(environment: Environment | None = None) -> int:
    """How many ranks this node has."""
    return _first_number(_LOCAL_SIZE, 1, environment)


def node_count(environment: Environment | None = None) -> int:
    """How many nodes the launcher spread the run over."""
    local = _first_number(("LOCAL_WORLD_SIZE",), 1, environment)
    return -(-_first_number(("WORLD_SIZE",), 1, environment) // local) if local else 1


def node_identity(environment: Environment | None = None) -> list[str]:
    return [text(name, environment) for name in _NODE]


def _first_number(names: tuple[str, ...], default: int, environment: Environment | None) -> int:
    texts = (text(name, environment) for name in names)
    return next((int(found) for found in texts if found.isdigit()), default)


def slurm_job(environment: Environment | None = None) -> tuple[str, float | None]:
    """Its number, empty outside of one, and when it was to end, by the clock, as it began: newer releases say so."""
    end = text("SLURM_JOB_END_TIME", environment)
    return text("SLURM_JOB_ID", environment), float(end) if end.isdigit() else None


# -- where things are -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Ours in the user's cache; not made yet. RuntimeError where the user has no home."""
    given = Path(text("XDG_CACHE_HOME"))
    return (given if given.is_absolute() else Path.home() / ".cache") / "simpletuner-gh200"


def huggingface_home(environment: Environment | None = None) -> Path:
    default = Path(text("HOME", environment) or "~", ".cache", "huggingface")
    return Path(text("HF_HOME", environment) or default).expanduser()


def hub_folder(environment: Environment | None = None) -> Path:
    """Where models are kept that were downloaded."""
    return Path(text("HF_HUB_CACHE", environment) or huggingface_home(environment) / "hub")


# -- processes we start -----------------------------------------------------------------------------------


def for_child(added: Environment, *, without: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a process to be started: this one's, less some variables, and others on top."""
    dropped = set(without)
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, **added}


def python_path(*first: Path | str) -> str:
    """For PYTHONPATH: these folders before what is there."""
    return os.pathsep.join(filter(None, (*map(str, first), text("PYTHONPATH"))))
