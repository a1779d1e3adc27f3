"""``gh200 report``: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.operate.report.page import build, write


def report(
    run: Annotated[Path, typer.Argument(help="Output folder of a run, or its telemetry file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    doctor: Annotated[
        Path | None,
        typer.Option("--doctor", help="A doctor's report to show; default: the one beside the run or here."),
    ] = None,
) -> None:
    """Write one self-contained HTML page: summary, plots, settings with their origins, findings, versions.

    It needs no network, reads well on a phone, and prints.

    Examples:

      gh200 report output/my-run

      gh200 report output/my-run -o my-run.html --doctor gh200_diagnostic_report.json
    """
    write(build(run, doctor=doctor), output)
    say(output)


COMMAND = Command(name="report", run=report, panel="Operate")
