"""``gh200 selftest``: does the memory room keep its promises on this device?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.results import show_results
from simpletuner_gh200.cli.tables import paragraph
from simpletuner_gh200.cli.terminal import screen
from simpletuner_gh200.draw import save

REPORT = Path("gh200_selftest_report.json")


def selftest(
    as_json: AsJson = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the report goes.")] = REPORT,
    bench: Annotated[bool, typer.Option("--bench", help="Also measure the link and Grace memory: minutes.")] = False,
    device: Annotated[int, typer.Option("--device", "-d", min=0, help="Which device to test.")] = 0,
) -> None:
    """Check capabilities, slabs, copies and failures on the GPU, and write a report to send back.

    Takes a few seconds and some hundred megabytes, and leaves nothing behind. The report holds no secrets and no
    paths. Without a GPU what needs one is skipped. Exit code 0: nothing failed; 1: something did.

    Examples:

      gh200 selftest

      gh200 selftest --device 1 -o report.json

      gh200 selftest --bench --json | jq .pool

      gh200 selftest --json | jq '.checks[] | select(.status == "fail")'
    """
    from simpletuner_gh200.diagnostics.selftest import run
    from simpletuner_gh200.memory.driver import detect

    console = screen(stderr=as_json)
    driver = detect.current()
    result = run.selftest(driver, ordinal=device)
    measured = {}
    if bench:
        from simpletuner_gh200.diagnostics.selftest.bench import measure_machine

        measured = measure_machine(driver, device)
    document = result.to_json() | measured
    save(json.dumps(document, indent=2) + "\n", output)
    show_results(console, "gh200 selftest", result, report=output)
    for number, answer in measured.get("questions", {}).items():
        paragraph(console, f"question {number}: {'cannot be answered here' if answer is None else json.dumps(answer)}")
    conclude(document, as_json, lambda: paragraph(console, result.closing_line), ok=result.ok)


COMMAND = Command("selftest", selftest, panel="More: measure", order=10)
