"""``gh200 ramp``: the batch ramp of a configuration, before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from simpletuner_gh200.cli.command import AsJson, Command, Configuration, conclude
from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, screen
from simpletuner_gh200.config.files import locate_training_config
from simpletuner_gh200.config.training import read_training
from simpletuner_gh200.draw import save
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.ramp.preview import RampPreview, as_svg, in_characters, preview
from simpletuner_gh200.units import counted
from simpletuner_gh200.upstream.importing import check_import

SHOWN_AT_EACH_END = 12
"""Rows of a long table that are printed before and after the gap."""


def ramp(
    config: Configuration,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks. Default: num_processes, or 1.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches of one epoch and rank.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it, as SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the effective batch grows over a run: every change, the samples it takes, a drawing.

    The configuration needs only the ramp's keys, train_batch_size and max_train_steps. The length of the ramp,
    batch_rampup_steps, counts micro-batches per rank, while max_train_steps counts optimizer steps. A run that is given
    by num_train_epochs needs --batches, which SimpleTuner's log calls "Num batches".

    Examples:

      gh200 ramp config/config.json

      gh200 ramp config/config.json --world 4 -o ramp.svg

      gh200 ramp config/by-epochs.json --batches 120

      gh200 ramp config/config.json --json
    """
    if output is not None and output.suffix.lower() != ".svg":
        raise UsageError(f"-o {output}: unknown kind of picture", remedy="end the name in .svg")
    located = locate_training_config({}, explicit=str(config), env_name=None)
    # What its variables stand for is the release's to say; of other files the few keys that matter are known.
    options = check_import(say_on_a_terminal).table if located.backend == "env" else None
    report, notes = preview(read_training(located, {}, options=options), world=world, batches=batches)
    if output is not None:
        save(as_svg(report), output)

    def show() -> None:
        _print(report, notes, screen())
        if output is not None:
            say(f"drawn into {output}")

    conclude({**report.to_json(), "notes": notes}, as_json, show)


def _print(report: RampPreview, notes: list[str], console: Console) -> None:
    ramp, reached = report.ramp, report.target_reached
    for note in (*notes, *report.notices):
        paragraph(console, f"note: {note}")
    headings = ("optimizer step", "micro-batch", "samples before", "accumulation", "effective batch")
    rows = [[str(value) for value in report.change_row(window).values()] for window in report.changes]
    if (left_out := len(rows) - 2 * SHOWN_AT_EACH_END) > 1:
        gap = [f"({left_out} more)", "", "", "", ""]
        rows = [*rows[:SHOWN_AT_EACH_END], gap, *rows[-SHOWN_AT_EACH_END:]]
    title = f"batch ramp, {ramp.curve}, {counted(ramp.world_size, 'rank')}"
    show_table(console, headings, rows, title=title, right=range(len(headings)))
    for line in in_characters(report, width=max(20, min(72, console.width - 12))):
        console.print(line, markup=False, highlight=False, style="green")
    end = f"the target from optimizer step {reached} on" if reached is not None else "the target is not reached"
    micro_batches = counted(report.total_samples // ramp.unit, "micro-batch", "micro-batches")
    paragraph(console, f"batch_rampup_steps {ramp.ramp_steps} counts micro-batches per rank, not optimizer steps")
    run = f"{counted(report.steps, 'optimizer step')}, {counted(report.total_samples, 'sample')}"
    paragraph(console, f"{run}, {micro_batches} per rank; {end}")


COMMAND = Command("ramp", ramp, panel="More: before a run", order=20)
