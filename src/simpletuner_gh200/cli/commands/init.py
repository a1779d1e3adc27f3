"""``gh200 init``: a project to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.cli.words import say_on_a_terminal
from simpletuner_gh200.operate.models import FAMILIES, Model, choose_model
from simpletuner_gh200.operate.project import Project, Wish, plan_project, write
from simpletuner_gh200.units import format_bytes
from simpletuner_gh200.upstream.option_reading import installed_options


def init(
    folder: Annotated[Path, typer.Argument(help="Where the project goes; made if it is not there.")],
    data: Annotated[Path, typer.Option("--data", help="Folder with images, and captions as .txt beside them.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="A family of SimpleTuner's; FAMILY:FLAVOUR; FAMILY=REPOSITORY; a pipeline folder."
        ),
    ] = "flux",
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of each.")] = 1,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 1000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples per micro-batch and rank.")] = 4,
    resolution: Annotated[
        int | None, typer.Option("--resolution", min=16, help="Pixels; default: the model's.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Settings that also train without a GPU.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a training configuration, a dataset list and a launch file that `gh200 train` takes as they are.

    Several GPUs or nodes are sharded by FSDP2.

    Examples:

      gh200 init my-run --data ~/pictures

      gh200 init my-run --model sdxl --data ~/pictures --steps 2000

      gh200 init my-run --model z_image --data ~/pictures

      gh200 init big-run --model flux --data /data/set --nodes 2 --gpus-per-node 4
    """
    wish = Wish(
        folder=folder,
        model=_chosen(model),
        data=data,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        steps=steps,
        batch=batch,
        resolution=resolution,
        cpu=cpu,
    )
    project = plan_project(wish)
    written = write(project, force=force)
    for line in _found_and_chosen(project):
        say(line)
    for path in written:
        say(f"wrote {path}")
    config = shlex.quote(str(folder / "config" / "config.json"))
    say(f"next: gh200 config check {config} && gh200 doctor {config} && gh200 train --config {config}")


def _chosen(model: str) -> Model:
    """What we know ourselves needs no look at the installed release, which takes long the first time."""
    if model in FAMILIES:
        return choose_model(model)
    reading = installed_options(say_on_a_terminal)
    for note in reading.notes:
        say(f"note: {note}", error=True)
    return choose_model(model, reading.table.families if reading.table is not None else None)


def _found_and_chosen(project: Project) -> list[str]:
    data = project.data
    return [
        f"found {data.samples} images, {data.captioned} with a caption beside them, {format_bytes(data.bytes)}",
        *(f"chose {decision.what}: {decision.why}" for decision in project.decisions),
    ]


COMMAND = Command(name="init", run=init, panel="Operate")
