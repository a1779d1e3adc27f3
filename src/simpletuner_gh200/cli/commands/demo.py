"""``gh200 demo``: the main job, small: real SimpleTuner on a tiny model with the extension on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import show_table
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, screen


def demo(
    folder: Annotated[Path, typer.Option(help="Where model, images, caches and output go.")] = Path("gh200-demo"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps to train.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Train a LoRA on a tiny SDXL made on the spot, through `gh200 train`, with every feature on.

    Examples:

      gh200 demo

      gh200 demo --steps 40 --json
    """
    from simpletuner_gh200.demo.run import run_demo, summary_lines
    from simpletuner_gh200.operate import preflight

    preflight.check_installation(say_on_a_terminal)
    if not as_json:
        say(f"Training a tiny SDXL in {folder} (the log goes to {folder}/training.log) ...", error=True)
    with screen(stderr=True).status("training"):
        done = run_demo(folder, steps=steps)
    result = done.to_json()
    lines = summary_lines(result, done.summary)
    conclude(result, as_json, lambda: show_table(screen(), ("", ""), lines, title="gh200 demo"))


COMMAND = Command("demo", demo, panel="More: before a run", order=40)
