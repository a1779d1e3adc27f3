"""``gh200 baseline``: capture how fast a run is, and compare two of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import PASSED_ON, AsJson, Command, conclude
from simpletuner_gh200.cli.tables import show_table
from simpletuner_gh200.cli.terminal import say, screen, stdout_kept_for_json

app = typer.Typer(
    help="Capture how fast a run is, and compare two of them.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(context_settings=PASSED_ON)
def capture(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps.")] = 1000,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the baseline goes.")] = Path("baseline"),
    nsys: Annotated[bool, typer.Option("--nsys", help="Also trace with NVIDIA Nsight Systems.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train for a while and keep telemetry, nvidia-smi's log, the doctor's report and a summary.

    What follows -- is what `gh200 train` takes.

    Examples:

      gh200 baseline capture -- --config config/config.json

      gh200 baseline capture --steps 200 -o baseline/after-upgrade --nsys -- --config config/config.json
    """
    from simpletuner_gh200.diagnostics.context import Context
    from simpletuner_gh200.diagnostics.examine import examine
    from simpletuner_gh200.operate import baseline

    doctor = examine(Context(allocate=False)).to_json()
    flags = [word for word in context.args if word != "--"]
    with stdout_kept_for_json(as_json):
        recorded = baseline.capture(output, flags, steps=steps, doctor=doctor, nsys=nsys)
    metrics = {name: found and asdict(found) for name, found in baseline.describe(recorded).items()}
    document = {"folder": str(output), "steps": len(recorded.steps), "metrics": metrics}
    conclude(document, as_json, lambda: say((output / baseline.REPORT).read_text(encoding="utf-8").rstrip("\n")))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The baseline: a folder of `baseline capture`, or a run.")],
    second: Annotated[Path, typer.Argument(help="What to compare with it.")],
    tolerance: Annotated[str, typer.Option(help="Changes up to this share count as noise.")] = "5%",
    as_json: AsJson = False,
) -> None:
    """Say per metric whether the second is better, the same or worse, noise taken into account. Exit 1: worse.

    Examples:

      gh200 baseline compare baseline baseline/after-upgrade

      gh200 baseline compare output/old output/new --tolerance 3% --json
    """
    from simpletuner_gh200.operate import baseline
    from simpletuner_gh200.telemetry.reading import read_run

    found = baseline.compare(read_run(first), read_run(second), baseline.parse_tolerance(tolerance))
    ok = not baseline.regressed(found)
    headings, rows = ("metric", "before", "after", "change", "verdict"), [row.cells() for row in found]
    document = {"ok": ok, "metrics": [asdict(row) for row in found]}
    conclude(document, as_json, lambda: show_table(screen(), headings, rows, title=f"{first} -> {second}"), ok=ok)


COMMAND = Command("baseline", app, panel="More: runs", order=20)
