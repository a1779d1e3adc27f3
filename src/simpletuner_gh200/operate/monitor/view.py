"""A run on a terminal: whether it is alive, how far it is, numbers with small curves, ranks, alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from simpletuner_gh200.operate.liveness import Liveness
from simpletuner_gh200.operate.monitor.alerts import Alert
from simpletuner_gh200.operate.monitor.cache_counts import shares_in_memory
from simpletuner_gh200.operate.ranks import RankTable
from simpletuner_gh200.operate.report.findings import rank_words
from simpletuner_gh200.operate.run_folder import run_name
from simpletuner_gh200.telemetry.printable import printable
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import counted, format_bytes, format_seconds

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.:-=+*#"
"""For terminals whose encoding has no bars."""
_BESIDE = 38
"""Columns that names, values and the frame take beside a curve."""
_SHOWN_RANKS = 8

_STATES = {"running": "green", "ended": "bold", "gone": "bold red", "unseen": "yellow"}

_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4g}"),
    ("learning rate", "learning_rate", lambda value: f"{value:.3g}"),
    ("step", "step_seconds", format_seconds),
    ("data wait", "data_wait_seconds", format_seconds),
    ("samples/s", "samples_per_second", lambda value: f"{value:.3g}"),
    ("effective batch", "effective_batch", lambda value: f"{value:.0f}"),
    ("host available", "host/available", format_bytes),
    ("process", "host/resident", format_bytes),
    ("slabs", "slab_bytes", format_bytes),
    ("HBM used", "device/used", format_bytes),
    ("link in /s", "device/link_in_per_second", format_bytes),
)


def view(
    run: Recorded,
    found: Sequence[Alert],
    alive: Liveness,
    ranks: RankTable | None = None,
    *,
    width: int = 80,
    plain: bool = False,
) -> RenderableType:
    """Everything on one screen that is ``width`` columns wide. ``plain``: its encoding has ASCII only."""
    parts: list[RenderableType] = [_heading(run, alive), _progress(run, width), _curves(run, width, plain=plain)]
    if ranks is not None:
        parts.append(_ranks(ranks))
    parts += [Text(f"{_level(alert)}: {printable(alert.text)}", style=_style(alert)) for alert in found]
    if not found:
        parts.append(Text("nothing to be alarmed about", style="dim"))
    return Panel(Group(*parts), title=Text(printable(run_name(run.path))), title_align="left")


def spark(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """The latest values as a row of bars. Few giants and dwarfs are cut off, so that they don't flatten the rest."""
    bars = _PLAIN_BARS if plain else _BARS
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


def _heading(run: Recorded, alive: Liveness) -> RenderableType:
    text = Text(printable(alive.words), style=_STATES[alive.state])
    wanted = run.start.get("max_steps")
    done = run.steps[-1]["step"] if run.steps else run.start.get("step", 0)
    facts = [f"step {done}" + (f" of {wanted}" if wanted else "")]
    if alive.elapsed is not None:
        facts.append(f"{format_seconds(alive.elapsed)} elapsed")
    if alive.remaining is not None:
        facts.append(f"about {format_seconds(alive.remaining)} remaining")
    return text.append("\n" + "   ".join(facts), style="not bold default")


def _progress(run: Recorded, width: int) -> RenderableType:
    total = run.start.get("max_steps")
    done = run.steps[-1]["step"] if run.steps else 0
    if not isinstance(total, int) or total <= 0:
        return Text("")
    line = Table.grid()  # a bar alone doesn't end its line
    line.add_row(ProgressBar(total=total, completed=min(done, total), width=max(10, width - 4)))
    return line


def _curves(run: Recorded, width: int, *, plain: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    room = max(1, width - _BESIDE)
    rows = [(title, unit, run.latest(name, room)) for title, name, unit in _SHOWN]
    rows.append(("cache hits", lambda value: f"{value:.0%}", shares_in_memory(run, room)))
    for title, unit, values in rows:
        if values:
            curve = Text(spark(values, width - _BESIDE, plain=plain), style="green", no_wrap=True, overflow="crop")
            table.add_row(Text(title, style="bold", no_wrap=True), Text(unit(values[-1]), no_wrap=True), curve)
    return table


def _ranks(ranks: RankTable) -> RenderableType:
    head = f"{counted(len(ranks.rows), 'rank')} on {counted(len(ranks.nodes), 'node')}: {rank_words(ranks)}"
    table = Table.grid(padding=(0, 2))
    shown = sorted(ranks.rows, key=lambda row: -row.data_wait)[:_SHOWN_RANKS]
    for row in sorted(shown, key=lambda row: row.rank):
        mark = "slowest" if row.rank == ranks.slowest.rank else ""
        memory = format_bytes(row.resident) if row.resident is not None else ""
        times = f"step {format_seconds(row.step)}", f"data wait {format_seconds(row.data_wait)}"
        table.add_row(Text(f"rank {row.rank}", style="bold"), Text(printable(row.node)), *times, memory, mark)
    return Group(Text(printable(head)), table)


def _level(alert: Alert) -> str:
    return "ALARM" if alert.level == "alarm" else "warning"


def _style(alert: Alert) -> str:
    return "bold red" if alert.level == "alarm" else "yellow"
