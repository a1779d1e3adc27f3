"""``gh200 doctor``: is this machine, environment and configuration ready for a run?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import screen
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import SYMBOLS, Examination, examine, write_report
from simpletuner_gh200.errors import UsageError

REPORT = Path("gh200_diagnostic_report.json")


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Also examine this training configuration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.")] = REPORT,
    oversubscription_scale: Annotated[
        float, typer.Option("--oversubscription-scale", min=0.1, max=16, help="Allocate so many times HBM.")
    ] = 1.5,
    skip_allocation: Annotated[
        bool, typer.Option("--skip-allocation", help="Allocate nothing on the device and measure nothing.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Explain every check, not just the bad ones.")
    ] = False,
    root: Annotated[Path, typer.Option("--root", hidden=True, help="Look at the machine below this folder.")] = Path(
        "/"
    ),
) -> None:
    """Examine machine, environment and configuration; say what was found, why it matters and how to fix it.

    The report is also written to gh200_diagnostic_report.json. Exit code 0: nothing failed; 1: something did.

    Examples:

      gh200 doctor

      gh200 doctor config/config.json --skip-allocation

      gh200 doctor --json | jq '.checks[] | select(.status == "fail")'
    """
    if config is not None and not config.is_file():
        raise UsageError(f"no such file: {config}", remedy="name a training configuration, or none")
    context = Context(
        root=root, config=config, allocate=not skip_allocation, oversubscription_scale=oversubscription_scale
    )
    examination = examine(context)
    write_report(examination, output)
    if as_json:
        print(json.dumps(examination.to_json()))
    else:
        _print(examination, screen(), verbose=verbose, output=output)
    if not examination.ok:
        raise typer.Exit(1)


def _print(examination: Examination, console: Console, *, verbose: bool, output: Path) -> None:
    table = Table("", "code", "what", "found", title="gh200 doctor", title_justify="left", expand=False)
    for check, finding in examination.rows:
        found = Text(finding.found)
        if finding.fix:
            found.append(f"\nfix: {finding.fix}", style="bold")
        if verbose or finding.status in {"warn", "fail"}:
            found.append(f"\nwhy: {check.why}", style="dim")
        table.add_row(SYMBOLS[finding.status], check.code, Text(check.what), found)
    console.print(table)
    counts = examination.counts
    line = f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed, {counts['skip']} skipped"
    console.print(f"{line}; report in {output}", highlight=False, markup=False)


COMMAND = Command(name="doctor", run=doctor, panel="Operate")
