"""``gh200 init``: a project to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import paragraph
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, screen
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.choices import Wish
from simpletuner_gh200.operate.models import choose_model
from simpletuner_gh200.operate.preflight import check_installation
from simpletuner_gh200.operate.project import Project, plan_project, write
from simpletuner_gh200.operate.slurm import SCRIPT
from simpletuner_gh200.units import counted, format_bytes


def init(
    folder: Annotated[Path, typer.Argument(help="Folder for the project, created if needed.")],
    data: Annotated[Path, typer.Option(help="Folder with images, and a .txt caption next to each.")],
    model: Annotated[
        str | None, typer.Option(help="FAMILY, FAMILY:FLAVOUR, FAMILY=REPOSITORY or a folder. Default: flux.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: by the number of images.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples per micro-batch and rank.")] = 4,
    resolution: Annotated[int | None, typer.Option(min=16, help="Pixels; default: by model and images.")] = None,
    ramp: Annotated[bool, typer.Option("--ramp", help="An effective batch that grows.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Train all weights, over several GPUs with FSDP2.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Also write a train.sbatch.")] = False,
    container: Annotated[str, typer.Option(help="For --slurm: enroot (pyxis), apptainer, podman or none.")] = "none",
    image: Annotated[str | None, typer.Option(help="The container's image, with gh200 in it.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="For a CPU; without --model a rehearsal on a tiny one.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a training configuration, a dataset list and a launch file that `gh200 train` takes as they are.

    It trains a LoRA, with the whole model on every GPU; with --full all weights, sharded over several GPUs by FSDP2.
    With --cpu and no --model it is a rehearsal of minutes: a tiny model, made on the spot, and a few steps on your
    images.

    Examples:

      gh200 init my-run --data ~/pictures

      gh200 init rehearsal --data ~/pictures --cpu

      gh200 init my-run --model sdxl --data ~/pictures --steps 2000

      gh200 init my-run --model z_image --data ~/pictures

      gh200 init big-run --model flux --data /data/set --nodes 2 --gpus-per-node 4

      gh200 init big-run --model flux --data /data/set --full --gpus-per-node 4

      gh200 init big-run --data /data/set --slurm --nodes 2 --gpus-per-node 4 --container apptainer --image gh200.sif
    """
    if not slurm and (container != "none" or image):
        raise UsageError("--container and --image are about train.sbatch", remedy="add --slurm, or leave them out")
    options = check_installation(say_on_a_terminal)
    if options.table is None:
        raise UsageError("; ".join(options.notes), remedy="see `gh200 doctor`")
    rehearsal = cpu and model is None
    chosen = choose_model(str(tiny_model(folder)) if rehearsal else model or "flux", options.table.families)
    size = (nodes, gpus_per_node, steps, batch, resolution)
    wish = Wish(folder, chosen, data, *size, full, cpu, ramp, rehearsal, slurm, container, image)
    project = plan_project(wish)
    written = write(project, force=force)
    config = folder / "config" / "config.json"

    def show() -> None:
        console = screen()
        for line in _found_and_chosen(project):
            paragraph(console, line, indent="  ")
        for path in written:
            say(f"wrote {path}")
        named = shlex.quote(str(config))
        here = f"gh200 doctor {named} && gh200 train --config {named}"
        say(f"next: gh200 config check {named} && {f'sbatch {shlex.quote(str(folder / SCRIPT))}' if slurm else here}")

    document = {**_document(project), "config": str(config), "written": [str(path) for path in written]}
    conclude(document, as_json, show)


def tiny_model(folder: Path) -> Path:
    from simpletuner_gh200.demo.project import DemoProject, write_model_in_subprocess

    say_on_a_terminal("gh200: making a tiny model for a rehearsal; --model trains a real one")
    return write_model_in_subprocess(DemoProject(folder.absolute()).model)


def _document(project: Project) -> dict[str, Any]:
    data = project.data
    return {
        "folder": str(project.wish.folder),
        "trains": {
            "what": "all weights" if project.wish.full else "lora",
            "ranks": project.wish.ranks,
            "sharded": project.wish.sharded,
        },
        "found": {"images": data.samples, "captioned": data.captioned, "bytes": data.bytes},
        "decisions": [{"what": decision.what, "why": decision.why} for decision in project.decisions],
        "doubt": project.doubt,
    }


def _found_and_chosen(project: Project) -> list[str]:
    data = project.data
    return [
        f"found {counted(data.samples, 'image')}, {data.captioned} with a caption, {format_bytes(data.bytes)}",
        *(f"chose {decision.what}: {decision.why}" for decision in project.decisions),
        *([f"BUT {project.doubt}"] if project.doubt else []),
    ]


COMMAND = Command("init", init, panel="Start here", order=30)
