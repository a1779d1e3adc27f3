"""``gh200 doctor``: is this machine, environment and configuration ready for a run?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import paragraph
from simpletuner_gh200.cli.terminal import say_on_a_terminal, screen
from simpletuner_gh200.diagnostics.check import Check, CheckResult
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import Examination, examine, symbol
from simpletuner_gh200.draw import save
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.importing import check_import

REPORT = Path("gh200_diagnostic_report.json")


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Also examine this training configuration.")] = None,
    as_json: AsJson = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.", show_default=False)] = REPORT,
    oversubscription_scale: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=16, help="Allocate N times HBM.")
    ] = 1.5,
    skip_allocation: Annotated[
        bool, typer.Option("--skip-allocation", help="Measure nothing, believe an earlier import of these versions.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Explain every check.")] = False,
    root: Annotated[Path, typer.Option(hidden=True, help="Look at the machine below this folder.")] = Path("/"),
) -> None:
    """Examine machine, environment and configuration: the verdict first, then what is wrong and how to fix it.

    The report is also written to a file, gh200_diagnostic_report.json if --output names none. Exit code 0: nothing
    failed; 1: something did.

    Examples:

      gh200 doctor

      gh200 doctor config/config.json --skip-allocation

      gh200 doctor --json | jq '.checks[] | select(.status == "fail")'
    """
    if config is not None and not config.is_file():
        raise UsageError(f"no such file: {config}", remedy="name a training configuration, or none")
    context = Context(
        root=root,
        config=config,
        allocate=not skip_allocation,
        oversubscription_scale=oversubscription_scale,
        check_import=lambda: check_import(say_on_a_terminal, refresh=not skip_allocation),
        check_configuration=_as_before_a_run,
    )
    examination = examine(context)
    save(json.dumps(examination.to_json(), indent=2, ensure_ascii=False) + "\n", output)

    def show() -> None:
        _print(examination, screen(), verbose=verbose, output=output)

    conclude(examination.to_json(), as_json, show, ok=examination.ok)


def _as_before_a_run(config: Path) -> Sequence[str]:
    from simpletuner_gh200.operate.preflight import check_configuration

    return check_configuration(explicit=str(config), env_name=None, flags=(), say=say_on_a_terminal).notes


def _print(examination: Examination, console: Console, *, verbose: bool, output: Path) -> None:
    colour = "bold green" if examination.ok else "bold red"
    paragraph(console, f"gh200 doctor: {examination.verdict}", style=colour)
    paragraph(console, f"{examination.closing_line}; report in {output}")
    for status in ("fail", "warn"):
        for check, result in examination.having(status):
            console.print()
            _wrong(console, check, result)
    console.print()
    for status in ("pass", "skip") if verbose else ("pass",):
        for check, result in examination.having(status):
            paragraph(console, f"{check.what}: {result.found}", first=_first(status, check, console), indent=" " * 10)
            if verbose:
                paragraph(console, check.why, first=" " * 10, indent=" " * 10, style="dim")
    skipped = examination.skipped_in_words
    if skipped and not verbose:
        paragraph(console, skipped, first=f"{symbol('skip', ascii_only=console.options.ascii_only)} ", indent=" " * 10)


def _wrong(console: Console, check: Check, result: CheckResult) -> None:
    paragraph(console, check.what, first=_first(result.status, check, console), indent=" " * 10, style="bold")
    for name, words, style in (("found", result.found, ""), ("fix", result.fix, "bold"), ("why", check.why, "dim")):
        if words:
            paragraph(console, words, first=f"   {name + ':':<7}", indent=" " * 10, style=style)


def _first(status: str, check: Check, console: Console) -> str:
    return f"{symbol(status, ascii_only=console.options.ascii_only)} {check.code} "


COMMAND = Command("doctor", doctor, panel="Start here", order=20)
