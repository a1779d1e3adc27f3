"""``gh200 report``: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, Run, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.draw import save
from simpletuner_gh200.operate.report.page import build
from simpletuner_gh200.operate.run_folder import telemetry_of


def report(
    run: Run = None,
    nodes: Annotated[list[Path] | None, typer.Argument(help="Output folders of the run's other nodes.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: with the run's records.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: findings, summary, plots, ranks, settings with their origins, versions.

    Ranks of all nodes that write to the same folder are in it; folders of others may be named after the first. It needs
    no network, reads well on a phone, and prints.

    Examples:

      gh200 report

      gh200 report my-project --json

      gh200 report node0/output node1/output

      gh200 report output/my-run -o my-run.html
    """
    records = telemetry_of(run)
    page = output or records.with_name("report.html")
    save(build(records, other_nodes=nodes or ()), page)
    conclude({"report": str(page)}, as_json, lambda: say(page))


COMMAND = Command("report", report, panel="Start here", order=70)
