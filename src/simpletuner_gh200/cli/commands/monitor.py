"""``gh200 monitor``: watch a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from simpletuner_gh200.cli.command import Command
from simpletuner_gh200.cli.terminal import say, screen
from simpletuner_gh200.operate.liveness import Liveness, liveness
from simpletuner_gh200.operate.monitor.alerts import Alert, alerts
from simpletuner_gh200.operate.monitor.follow import RunFollower, wait_for
from simpletuner_gh200.operate.monitor.view import view
from simpletuner_gh200.operate.run_folder import newest_run, telemetry_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def monitor(
    run: Annotated[
        Path | None, typer.Argument(help="Output or project folder of the run; default: the newest below here.")
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 1.0,
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
        follower = RunFollower(telemetry_of(run) if run is not None else newest_run(Path()))
        print(json.dumps(_document(follower))) if as_json else console.print(_view(follower, console))
        follower.close()
        return
    try:
        _watch(RunFollower(wait_for(run, every, say) if run is not None else newest_run(Path())), console, every)
    except KeyboardInterrupt:
        console.print("left; the run goes on by itself")


def _now(follower: RunFollower) -> tuple[Liveness, list[Alert]]:
    alive = liveness(follower.recorded)
    gone = alive.words if alive.state == "gone" else ""
    return alive, alerts(follower.recorded, time.time(), gone=gone, others=follower.others)


def _document(follower: RunFollower) -> dict[str, Any]:
    recorded, ranks = follower.recorded, follower.ranks()
    alive, found = _now(follower)
    return {
        "run": str(recorded.path),
        "state": alive.state,
        "elapsed_seconds": alive.elapsed,
        "remaining_seconds": alive.remaining,
        "latest": recorded.steps[-1] if recorded.steps else None,
        "end": recorded.end,
        "ranks": ranks.to_json() if ranks is not None else None,
        "alerts": [asdict(alert) for alert in found],
    }


def _view(follower: RunFollower, console: Console) -> RenderableType:
    alive, found = _now(follower)
    plain = console.options.ascii_only
    return view(follower.recorded, found, alive, follower.ranks(), width=console.width, plain=plain)


def _watch(follower: RunFollower, console: Console, every: float) -> None:
    """Until the run ends or the reader does."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            follower.poll()
            live.update(_view(follower, console))
            if follower.recorded.end:
                return
            time.sleep(every)


COMMAND = Command("monitor", monitor, panel="Operate", order=10)
