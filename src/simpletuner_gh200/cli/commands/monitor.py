"""``gh200 monitor``: watch a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from simpletuner_gh200.cli.command import Command, Run
from simpletuner_gh200.cli.terminal import say, screen
from simpletuner_gh200.operate.monitor import screen_of, wait_for
from simpletuner_gh200.operate.run_folder import telemetry_of
from simpletuner_gh200.telemetry.view import RECENT, RunView


def monitor(
    run: Run = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print one JSON object.")] = False,
) -> None:
    """Watch a running job live: is it alive, how far, loss, step time, data wait, memory, ranks, and alerts.

    Ctrl-C leaves training alone.

    Examples:

      gh200 monitor

      gh200 monitor my-project --every 5

      gh200 monitor output/my-run --json | jq .alerts
    """
    console = screen()
    if as_json or once:
        view = RunView.read(telemetry_of(run))
        print(json.dumps(_document(view))) if as_json else console.print(screen_of(view, console))
        return
    try:
        _watch(RunView.follow(wait_for(run, every, say)), console, every)
    except KeyboardInterrupt:
        console.print("left; the run goes on by itself")


def _document(view: RunView) -> dict[str, Any]:
    status, ranks = view.status(), view.ranks(latest=RECENT)
    return {
        "run": str(view.run.path),
        "state": status.state,
        "elapsed_seconds": status.elapsed,
        "remaining_seconds": status.remaining,
        "latest": view.run.steps[-1] if view.run.steps else None,
        "end": view.run.end,
        "ranks": ranks.to_json() if ranks is not None else None,
        "alerts": [asdict(alert) for alert in view.alerts()],
    }


def _watch(view: RunView, console: Console, every: float) -> None:
    """Until the run ends or the reader does."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            view.refresh()
            live.update(screen_of(view, console))
            if view.run.end:
                return
            time.sleep(every)


COMMAND = Command("monitor", monitor, panel="Start here", order=60)
