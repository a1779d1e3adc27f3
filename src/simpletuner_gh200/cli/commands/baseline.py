"""``gh200 baseline``: capture how fast a run is, and compare two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.tables import show_table
from simpletuner_gh200.cli.terminal import say, screen, stdout_kept_for_json

app = typer.Typer(
    help="Capture how fast a run is, and compare two of them.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def capture(
    context: typer.Context,
    steps: Annotated[int, typer.Option("--steps", min=5, help="Optimizer steps.")] = 1000,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the baseline goes.")] = Path("baseline"),
    nsys: Annotated[bool, typer.Option("--nsys", help="Also trace with NVIDIA Nsight Systems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train for a while and keep telemetry, nvidia-smi's log, the doctor's report and a summary.

    What follows -- is what `gh200 train` takes.

    Examples:

      gh200 baseline capture -- --config config/config.json

      gh200 baseline capture --steps 200 -o baseline/after-upgrade --nsys -- --config config/config.json
    """
    from simpletuner_gh200.diagnostics.context import Context
    from simpletuner_gh200.diagnostics.examine import examine
    from simpletuner_gh200.operate.baseline.capture import REPORT
    from simpletuner_gh200.operate.baseline.capture import capture as capture_baseline
    from simpletuner_gh200.operate.baseline.compare import described

    doctor = examine(Context(allocate=False)).to_json()
    flags = [word for word in context.args if word != "--"]
    with stdout_kept_for_json(as_json):
        recorded = capture_baseline(output, flags, steps=steps, doctor=doctor, nsys=nsys)
    if as_json:
        print(json.dumps({"folder": str(output), "steps": len(recorded.steps), "metrics": described(recorded)}))
        return
    say((output / REPORT).read_text(encoding="utf-8").rstrip("\n"))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The baseline: a folder of `baseline capture`, or a run.")],
    second: Annotated[Path, typer.Argument(help="What to compare with it.")],
    tolerance: Annotated[str, typer.Option("--tolerance", help="Changes up to this share count as noise.")] = "5%",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say per metric whether the second is better, the same or worse, noise taken into account. Exit 1: worse.

    Examples:

      gh200 baseline compare baseline baseline/after-upgrade

      gh200 baseline compare output/old output/new --tolerance 3% --json
    """
    from simpletuner_gh200.operate.baseline.compare import compare as compare_runs
    from simpletuner_gh200.operate.baseline.compare import parse_tolerance, regressed
    from simpletuner_gh200.telemetry.reading import read_run

    found = compare_runs(read_run(first), read_run(second), parse_tolerance(tolerance))
    if as_json:
        print(json.dumps({"ok": not regressed(found), "metrics": [row.to_json() for row in found]}))
    else:
        rows = [(row.metric, *map(row.shown, (row.before, row.after)), row.words, row.judgement) for row in found]
        headings = ("metric", "before", "after", "change", "verdict")
        show_table(screen(), headings, rows, title=f"{first} -> {second}")
    if regressed(found):
        raise typer.Exit(1)


COMMAND = Command("baseline", app, panel="Operate", order=30)
