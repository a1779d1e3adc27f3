"""``gh200 baseline``: capture how fast a run is, and compare two of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import PASSED_ON, AsJson, Command, Run, conclude
from simpletuner_gh200.cli.tables import show_table
from simpletuner_gh200.cli.terminal import say, screen, stdout_kept_for_json

app = typer.Typer(
    help="Capture how fast a run is, and compare two of them.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(context_settings=PASSED_ON)
def capture(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [-- OPTIONS]", help="A run, and options of `gh200 train`.")
    ] = None,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps.")] = 1000,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: with the run's records.")] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Also trace with NVIDIA Nsight Systems.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train for a while and keep telemetry, nvidia-smi's log, the doctor's report and a summary.

    RUN is an output folder, a project folder or a configuration; without one it is what `gh200 train` would start
    here. What follows -- is what `gh200 train` takes.

    Examples:

      gh200 baseline capture my-run

      gh200 baseline capture my-run --steps 200 -o after-upgrade --nsys -- --optimizer=adamw_bf16
    """
    from simpletuner_gh200.diagnostics.context import Context
    from simpletuner_gh200.diagnostics.examine import examine
    from simpletuner_gh200.operate import baseline

    flags, folder = baseline.meant([word for word in words or () if word != "--"], output)
    doctor = examine(Context(allocate=False)).to_json()
    with stdout_kept_for_json(as_json):
        recorded = baseline.capture(folder, flags, steps=steps, doctor=doctor, nsys=nsys)
    metrics = {name: found and asdict(found) for name, found in baseline.describe(recorded).items()}
    document = {"folder": str(folder), "steps": len(recorded.steps), "metrics": metrics}
    conclude(document, as_json, lambda: say((folder / baseline.REPORT).read_text(encoding="utf-8").rstrip("\n")))


@app.command()
def compare(
    first: Run = None,
    second: Annotated[Path | None, typer.Argument(help="A run or baseline to compare with the first.")] = None,
    tolerance: Annotated[str, typer.Option(help="Changes up to this share count as noise.")] = "5%",
    as_json: AsJson = False,
) -> None:
    """Say per metric whether the second is better, the same or worse, noise taken into account. Exit 1: worse.

    Either is a run or a folder of `baseline capture`. One run alone is compared with the baseline beside its records.

    Examples:

      gh200 baseline compare my-run

      gh200 baseline compare my-run after-upgrade

      gh200 baseline compare output/old output/new --tolerance 3% --json
    """
    from simpletuner_gh200.operate import baseline
    from simpletuner_gh200.operate.run_folder import telemetry_of
    from simpletuner_gh200.telemetry.reading import read_run

    before, after = baseline.pair(telemetry_of(first), second and telemetry_of(second))
    found = baseline.compare(read_run(before), read_run(after), baseline.parse_tolerance(tolerance))
    ok = not baseline.regressed(found)
    headings, rows = ("metric", "before", "after", "change", "verdict"), [row.cells() for row in found]
    document = {"ok": ok, "metrics": [asdict(row) for row in found]}
    conclude(document, as_json, lambda: show_table(screen(), headings, rows, title=f"{before} -> {after}"), ok=ok)


COMMAND = Command("baseline", app, panel="More: runs", order=20)
