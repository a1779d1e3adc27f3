"""``gh200 report``: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.draw import save
from simpletuner_gh200.operate.report.page import build


def report(
    run: Annotated[Path, typer.Argument(help="Output or project folder of a run, or its telemetry file.")],
    nodes: Annotated[list[Path] | None, typer.Argument(help="Output folders of the run's other nodes.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    doctor: Annotated[Path | None, typer.Option(help="Doctor's report; default: beside the records.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: findings, summary, plots, ranks, settings with their origins, versions.

    Ranks of all nodes that write to the same folder are in it; folders of others may be named after the first. It needs
    no network, reads well on a phone, and prints.

    Examples:

      gh200 report output/my-run

      gh200 report my-project --json

      gh200 report node0/output node1/output

      gh200 report output/my-run -o my-run.html --doctor gh200_diagnostic_report.json
    """
    save(build(run, doctor=doctor, other_nodes=nodes or ()), output)
    conclude({"report": str(output)}, as_json, lambda: say(output))


COMMAND = Command("report", report, panel="Start here", order=70)
