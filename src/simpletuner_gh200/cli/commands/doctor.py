"""``gh200 doctor``: is this machine, environment and configuration ready for a run?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.results import show_results
from simpletuner_gh200.cli.terminal import say_on_a_terminal, screen
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import examine
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
        show_results(screen(), "gh200 doctor", examination, report=output, verbose=verbose)

    conclude(examination.to_json(), as_json, show, ok=examination.ok)


def _as_before_a_run(config: Path) -> Sequence[str]:
    from simpletuner_gh200.operate.preflight import check_configuration

    return check_configuration(explicit=str(config), env_name=None, flags=(), say=say_on_a_terminal).notes


COMMAND = Command("doctor", doctor, panel="Start here", order=20)
