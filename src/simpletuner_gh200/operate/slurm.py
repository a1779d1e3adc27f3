"""``gh200 init --slurm``: a script for sbatch, one launcher per node, that goes on where it was stopped.

The script itself is ``train.sbatch`` beside this file, where it can be read and checked as a script. What differs from
project to project stands at its top, and is filled in here.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner_gh200.errors import UsageError

_ODD = re.compile(r"""[^\w./+@=~-]""")
TEMPLATE = Path(__file__).with_name("train.sbatch")
SCRIPT = "train.sbatch"
LOGS = "logs"
LIMIT = "12:00:00"
"""Most sites grant it; a longer run is requeued and goes on."""
WARNING_SECONDS = 600
"""Before the limit: enough for a window and a checkpoint of a large model."""


HANDED_ON = (
    *("SLURM", "GH200", "SIMPLETUNER", "ACCELERATE", "HF", "WANDB"),
    *("NCCL", "GLOO", "FI", "UCX", "TORCH", "PYTORCH", "OMP"),
)
"""How the names of variables begin that a runtime with an environment of its own is to pass on."""

MODELS = "$HF_HOME"
"""A folder of the script's own: what was downloaded, and the token for it."""


@dataclass(frozen=True)
class Runtime:
    """How a command gets into a container. ``$image`` is the script's own variable."""

    name: str
    step: str = ""
    """Options of srun's."""
    node: str = ""
    """Words before the command."""
    mount: str = ""
    """What one folder is given as."""
    joined: str = ""
    """Between folders, where one option takes all of them."""


RUNTIMES = {
    each.name: each
    for each in (
        Runtime("none"),
        # Through pyxis, Slurm's plug-in for it: the step itself runs in the container.
        Runtime("enroot", step='--container-image="$image" --container-mounts="{mounts}"', mount="{0}:{0}", joined=","),
        Runtime("apptainer", node='apptainer exec --nv --bind "{mounts}" "$image"', mount="{0}", joined=","),
        Runtime(
            "podman",
            # Its own limit on processes, 2048, counts threads: ranks of large nodes have more.
            node="podman run --rm --device nvidia.com/gpu=all --network=host --ipc=host --pids-limit=-1 "
            "--ulimit=memlock=-1 --ulimit=nofile=65536 --cap-add=SYS_NICE "
            + " ".join(f"--env={prefix}_*" for prefix in HANDED_ON)
            + ' {mounts} "$image"',
            mount='--volume="{0}:{0}"',
            joined=" ",
        ),
    )
}


@dataclass(frozen=True)
class Batch:
    """What a script is made from."""

    folder: Path
    """The project's."""
    data: Path
    nodes: int
    gpus_per_node: int
    container: str = "none"
    image: str | None = None
    cpu: bool = False
    more_folders: Sequence[Path] = field(default=())
    """That a container needs to see besides: a model's, for instance."""


def problems(batch: Batch) -> list[str]:
    found = []
    if batch.container not in RUNTIMES:
        found.append(f"--container {batch.container!r}: use {', '.join(RUNTIMES)}")
    if batch.image and batch.container == "none":
        found.append("--image without --container: use --container enroot, apptainer or podman")
    if batch.container in RUNTIMES and batch.container != "none" and not batch.image:
        found.append(f"--container {batch.container} needs --image: a file or a name that {batch.container} knows")
    for folder in _folders(batch):
        if odd := _ODD.findall(str(folder)):
            shown = " ".join(dict.fromkeys(odd))
            found.append(f"{str(folder)!r}: {shown!r} in a path means something to the shell, Slurm or a container")
    return found


def train_sbatch(batch: Batch) -> str:
    """The script; UsageError, with every problem, where none can be made."""
    wrong = problems(batch)
    if wrong:
        raise UsageError("; ".join(wrong), remedy="correct what is named above, or leave --slurm out")
    folder = batch.folder.absolute()
    values = {
        "WHAT": _described(batch),
        "SCRIPT": shlex.quote(str(folder / SCRIPT)),
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(batch, folder)),
        "PROJECT": shlex.quote(str(folder)),
        "CONFIG": shlex.quote(str(folder / "config" / "config.json")),
        "OUTPUT": shlex.quote(str(folder / "output")),
        "GH200": _command(batch),
        "CONTAINER": _container(batch),
    }
    return re.sub(r"@([A-Z0-9]+)@", lambda found: values[found.group(1)], TEMPLATE.read_text(encoding="utf-8"))


def _directives(batch: Batch, folder: Path) -> list[str]:
    return [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '_', folder.name)}",
        f"--nodes={batch.nodes}",
        "--ntasks-per-node=1",
        *([] if batch.cpu else [f"--gpus-per-node={batch.gpus_per_node}"]),
        # Whole nodes: each rank finds its own Grace, and nobody else's page cache is in it.
        "--exclusive",
        "--mem=0",
        # The nodes' own limits on locked memory and open files, not those of the shell on the login node.
        "--propagate=NONE",
        f"--time={LIMIT}",
        f"--signal=B:USR1@{WARNING_SECONDS}",
        "--requeue",
        "--open-mode=append",
        f"--output={folder / LOGS / '%j.log'}",
    ]


def _described(batch: Batch) -> str:
    nodes = "one node" if batch.nodes == 1 else f"{batch.nodes} nodes"
    kind = "rank" if batch.cpu else "GPU"
    each = f"one {kind}" if batch.gpus_per_node == 1 else f"{batch.gpus_per_node} {kind}s"
    within = "" if batch.container == "none" else f", in a container of {batch.container}'s"
    return f"{nodes}, {each} each{within}"


def _command(batch: Batch) -> str:
    """The installation that made the script, where no container has one of its own."""
    return "gh200" if batch.container != "none" else f"{shlex.quote(sys.executable)} -m simpletuner_gh200"


def _folders(batch: Batch) -> list[Path]:
    return [folder.absolute() for folder in dict.fromkeys((batch.folder, batch.data, *batch.more_folders))]


def _image(named: str) -> str:
    """A file is found from wherever the job is submitted."""
    return str(Path(named).absolute()) if Path(named).is_file() else named


def _container(batch: Batch) -> str:
    runtime = RUNTIMES[batch.container]
    lines = ["step_options=()", "on_node=()"]
    if batch.image:
        mounts = runtime.joined.join(runtime.mount.format(each) for each in (*_folders(batch), MODELS))
        lines = [
            "# Models as they were downloaded, and the token for them: an image has neither.",
            'export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"',
            'mkdir -p "$HF_HOME"',
            f"image={shlex.quote(_image(batch.image))}",
            f"step_options=({runtime.step.format(mounts=mounts)})",
            f"on_node=({runtime.node.format(mounts=mounts)})",
        ]
    return "\n".join(lines) + "\n"
