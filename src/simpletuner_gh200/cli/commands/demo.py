"""``gh200 demo``: the main job, small: real SimpleTuner on a tiny model with the extension on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say, screen


def demo(
    folder: Annotated[Path, typer.Option(help="Where model, images, caches and output go.")] = Path("gh200-demo"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps to train.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a LoRA on a tiny SDXL made on the spot, through `gh200 train`, with every feature on.

    Examples:

      gh200 demo

      gh200 demo --steps 40 --json
    """
    from simpletuner_gh200.demo.run import run_demo
    from simpletuner_gh200.demo.summary import summary_lines
    from simpletuner_gh200.operate import preflight

    preflight.check_installation()
    if not as_json:
        say(f"Training a tiny SDXL in {folder} (the log goes to {folder}/training.log) ...", error=True)
    watched = sys.stderr.isatty() and not as_json
    result = run_demo(folder, steps=steps, show=_show if watched else None).to_json()
    if as_json:
        print(json.dumps(result))
        return
    table = Table(title="gh200 demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in summary_lines(result):
        table.add_row(label, text)
    screen().print(table)


def _show(line: str) -> None:
    say("  " + line.rstrip("\n"), error=True)


COMMAND = Command("demo", demo, panel="Train")
