"""A run on a terminal: whether it is alive, how far it is, numbers with small curves, ranks, alerts.

It only reads what the run records, so ending it never touches training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.run_folder import configuration_of, output_of, run_name, telemetry_of
from simpletuner_gh200.operate.run_lock import in_use
from simpletuner_gh200.telemetry.numbers import numbers_of
from simpletuner_gh200.telemetry.ranks import RankTable
from simpletuner_gh200.telemetry.reading import FILE
from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.telemetry.view import RECENT, RunView
from simpletuner_gh200.units import format_bytes, format_seconds

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.:-=+*#"
"""For terminals whose encoding has no bars."""
_FRAME = 10
"""Columns that the frame and the gaps between columns take."""
_SHOWN_RANKS = 8

_STATES = {"running": "green", "ended": "bold", "gone": "bold red", "unseen": "yellow"}


def wait_for(run: Path | None, every: float, say: Callable[[str], None]) -> Path:
    """The telemetry of ``run``, or of one here; waited for while a job may yet begin, else UsageError.

    Models are loaded and datasets staged before the first record.
    """
    reported, place = False, run or Path()
    while True:
        try:
            if run is not None or not _begins(output_of(place)):
                return telemetry_of(run)
        except UsageError:
            if not place.exists() or not (configuration_of(place) or in_use(output_of(place))):
                raise
        if not reported:
            working = in_use(output_of(place))
            say(f"no records yet in {place}; " + (f"at work: {working}" if working else "waiting for a run to begin"))
            reported = True
        time.sleep(every)


def _begins(output: Path) -> bool:
    """Is a job at work there that has recorded nothing yet? What others below recorded is not what is looked for."""
    return not (output / FILE).is_file() and bool(in_use(output))


def screen_of(view: RunView, console: Console) -> RenderableType:
    """Everything on one screen, as wide as the console."""
    parts: list[RenderableType] = [_heading(view), _bar(view, console.width), _curves(view, console)]
    if (ranks := view.ranks(latest=RECENT)) is not None:
        parts.append(_ranks(ranks))
    found = view.alerts()
    for alert in found:
        level, style = ("ALARM", "bold red") if alert.level == "alarm" else ("warning", "yellow")
        parts.append(Text(f"{level}: {printable(alert.text)}", style=style))
    if not found:
        parts.append(Text("nothing to be alarmed about", style="dim"))
    return Panel(Group(*parts), title=Text(printable(run_name(view.run.path))), title_align="left")


def spark(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The latest values as a row of bars. Few giants and dwarfs are cut off, so that they don't flatten the rest."""
    bars = _PLAIN_BARS if ascii_only else _BARS
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = _usual_range(shown)
    if high == low:
        return bars[3] * len(shown)
    return "".join(bars[max(0, min(7, int((value - low) / (high - low) * 8)))] for value in shown)


def _usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Without the twentieth at either end, one at least, where those lie far outside of the others' range."""
    ordered = sorted(values)
    cut = max(1, len(ordered) // 20) if len(ordered) > 3 else 0
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    spread = high - low
    beyond = [value for value in ordered if low - spread <= value <= high + spread]
    return (min(beyond), max(beyond)) if beyond else (ordered[0], ordered[-1])


def _heading(view: RunView) -> RenderableType:
    (_status, words), (_step, step), *times = view.progress()
    facts = [f"step {step}", *(f"caching {text}" if what == "caching" else f"{text} {what}" for what, text in times)]
    return Text(printable(words), style=_STATES[view.status().state]).append(
        "\n" + "   ".join(facts), "not bold default"
    )


def _bar(view: RunView, width: int) -> RenderableType:
    total, done = view.run.start.get("max_steps"), view.run.step
    if not isinstance(total, int) or total <= 0:
        return Text("")
    line = Table.grid()  # a bar alone doesn't end its line
    line.add_row(ProgressBar(total=total, completed=min(done, total), width=max(10, width - 4)))
    return line


def _curves(view: RunView, console: Console) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    rows = [(number.title, number.unit(points[-1][1]), points) for number, points in numbers_of(view.run)]
    room = console.width - _FRAME - sum(max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for title, value, points in rows:
        curve = spark([value for _step, value in points[-room:]], room, ascii_only=console.options.ascii_only)
        shown = Text(curve, "green", no_wrap=True, overflow="crop")
        table.add_row(Text(title, "bold", no_wrap=True), Text(value, no_wrap=True), shown)
    return table


def _ranks(ranks: RankTable) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    shown = sorted(ranks.rows, key=lambda row: -row.data_wait)[:_SHOWN_RANKS]
    for row in sorted(shown, key=lambda row: row.rank):
        mark = "slowest" if row.rank == ranks.slowest.rank else ""
        memory = format_bytes(row.resident) if row.resident is not None else ""
        times = f"step {format_seconds(row.step)}", f"data wait {format_seconds(row.data_wait)}"
        table.add_row(Text(f"rank {row.rank}", style="bold"), Text(printable(row.node)), *times, memory, mark)
    return Group(Text(printable(f"{ranks.size}: {ranks.words}")), table)
