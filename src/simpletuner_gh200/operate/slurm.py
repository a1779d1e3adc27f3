"""``gh200 init --slurm``: a script for sbatch, one launcher per node, that goes on where it was stopped.

The script itself is ``train.sbatch`` beside this file, where it can be read and checked as a script. What differs from
project to project stands at its top, and is filled in here.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.choices import Wish

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
class Container:
    """How a command gets into one. ``$image`` is the script's own variable."""

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
        Container("none"),
        # Through pyxis, Slurm's plug-in for it: the step itself runs in the container.
        Container(
            "enroot", step='--container-image="$image" --container-mounts="{mounts}"', mount="{0}:{0}", joined=","
        ),
        Container("apptainer", node='apptainer exec --nv --bind "{mounts}" "$image"', mount="{0}", joined=","),
        Container(
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


def problems(wish: Wish) -> list[str]:
    found = []
    if wish.container not in RUNTIMES:
        found.append(f"--container {wish.container!r}: use {', '.join(RUNTIMES)}")
    if wish.image and wish.container == "none":
        found.append("--image without --container: use --container enroot, apptainer or podman")
    if wish.container in RUNTIMES and wish.container != "none" and not wish.image:
        found.append(f"--container {wish.container} needs --image: a file or a name that {wish.container} knows")
    for folder in _folders(wish):
        if odd := _ODD.findall(str(folder)):
            shown = " ".join(dict.fromkeys(odd))
            found.append(f"{str(folder)!r}: {shown!r} in a path means something to the shell, Slurm or a container")
    return found


def train_sbatch(wish: Wish) -> str:
    """The script; UsageError, with every problem, where none can be made."""
    wrong = problems(wish)
    if wrong:
        raise UsageError("; ".join(wrong), remedy="correct what is named above, or leave --slurm out")
    folder = wish.folder.absolute()
    values = {
        "WHAT": _described(wish),
        "SCRIPT": shlex.quote(str(folder / SCRIPT)),
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(wish, folder)),
        "PROJECT": shlex.quote(str(folder)),
        "CONFIG": shlex.quote(str(folder / "config" / "config.json")),
        "OUTPUT": shlex.quote(str(folder / "output")),
        # The installation that made the script, where no container has one of its own.
        "GH200": f"{shlex.quote(sys.executable)} -m simpletuner_gh200" if wish.container == "none" else "gh200",
        "CONTAINER": _container(wish),
    }
    return re.sub(r"@([A-Z0-9]+)@", lambda found: values[found.group(1)], TEMPLATE.read_text(encoding="utf-8"))


def _directives(wish: Wish, folder: Path) -> list[str]:
    return [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '_', folder.name)}",
        f"--nodes={wish.nodes}",
        "--ntasks-per-node=1",
        *([] if wish.cpu else [f"--gpus-per-node={wish.gpus_per_node}"]),
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


def _described(wish: Wish) -> str:
    nodes = "one node" if wish.nodes == 1 else f"{wish.nodes} nodes"
    kind = "rank" if wish.cpu else "GPU"
    each = f"one {kind}" if wish.gpus_per_node == 1 else f"{wish.gpus_per_node} {kind}s"
    within = "" if wish.container == "none" else f", in a container of {wish.container}'s"
    return f"{nodes}, {each} each{within}"


def _folders(wish: Wish) -> list[Path]:
    return [folder.absolute() for folder in dict.fromkeys((wish.folder, wish.data, *wish.model.folders))]


def _container(wish: Wish) -> str:
    runtime = RUNTIMES[wish.container]
    lines = ["step_options=()", "on_node=()"]
    if wish.image:
        # A file is found from wherever the job is submitted.
        image = str(Path(wish.image).absolute()) if Path(wish.image).is_file() else wish.image
        mounts = runtime.joined.join(runtime.mount.format(each) for each in (*_folders(wish), MODELS))
        lines = [
            "# Models as they were downloaded, and the token for them: an image has neither.",
            'export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"',
            'mkdir -p "$HF_HOME"',
            f"image={shlex.quote(image)}",
            f"step_options=({runtime.step.format(mounts=mounts)})",
            f"on_node=({runtime.node.format(mounts=mounts)})",
        ]
    return "\n".join(lines) + "\n"
