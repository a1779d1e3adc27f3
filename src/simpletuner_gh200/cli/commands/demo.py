"""``gh200 demo``: the main job, small: real SimpleTuner on a tiny model with the extension on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with _watched(steps, on=sys.stderr.isatty() and not as_json) as show:
        done = run_demo(folder, steps=steps, show=show)
    result = done.to_json()
    lines = summary_lines(result, done.summary)
    conclude(result, as_json, lambda: show_table(screen(), ("", ""), lines, title="gh200 demo"))


@contextmanager
def _watched(steps: int, *, on: bool) -> Iterator[Callable[[str], None] | None]:
    """A line that says what is going on and how far it is; gives what is to be told of each line of the log."""
    if not on:
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from simpletuner_gh200.demo.run import progress_in

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen(stderr=True), transient=True) as bar:
        task = bar.add_task("making a tiny model", total=None)

        def show(line: str) -> None:
            phase, step = progress_in(line)
            if step is not None:
                bar.update(task, total=steps, completed=step, description=f"training, step {step}/{steps}")
            elif phase is not None:
                bar.update(task, description=phase)
            elif bar.tasks[0].description.startswith("making"):
                bar.update(task, description="starting SimpleTuner")

        yield show


COMMAND = Command("demo", demo, panel="More: before a run", order=40)
