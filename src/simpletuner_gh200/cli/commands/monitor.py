"""``gh200 monitor``: watch a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say, screen
from simpletuner_gh200.operate.monitor.alerts import alerts
from simpletuner_gh200.operate.monitor.follow import Follower, newest_run, wait_for
from simpletuner_gh200.operate.monitor.view import view


def monitor(
    run: Annotated[
        Path | None, typer.Argument(help="Output folder of the run; default: the newest below here.")
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print one JSON object.")] = False,
) -> None:
    """Watch a running job live: loss, step time, data wait, memory, and alerts. Ctrl-C leaves training alone.

    Examples:

      gh200 monitor

      gh200 monitor output/my-run --every 5

      gh200 monitor output/my-run --json | jq .alerts
    """
    console = screen()
    if as_json or once:
        _look_once(Follower(run or newest_run(Path())), console, as_json=as_json)
        return
    try:
        if run is not None:
            say(f"waiting for records in {run}; Ctrl-C leaves the run alone")
            wait_for(run, every)
        _watch(Follower(run or newest_run(Path())), console, every)
    except KeyboardInterrupt:
        console.print("left; the run goes on by itself")


def _look_once(follower: Follower, console: Console, *, as_json: bool) -> None:
    if as_json:
        recorded = follower.recorded
        document = {
            "run": str(recorded.path),
            "latest": recorded.steps[-1] if recorded.steps else None,
            "end": recorded.end,
        }
        print(json.dumps({**document, "alerts": [asdict(alert) for alert in alerts(recorded, time.time())]}))
    else:
        console.print(view(follower.recorded, alerts(follower.recorded, time.time())))
    follower.close()


def _watch(follower: Follower, console: Console, every: float) -> None:
    """Until the run ends or the reader does."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            follower.poll()
            live.update(view(follower.recorded, alerts(follower.recorded, time.time())))
            if follower.recorded.end:
                return
            time.sleep(every)


COMMAND = Command(name="monitor", run=monitor, panel="Operate")
