"""A run on a terminal: numbers, small curves, alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from simpletuner_gh200.operate.monitor.alerts import Alert
from simpletuner_gh200.operate.report.summary import summary
from simpletuner_gh200.telemetry.printable import printable
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import format_bytes, format_seconds

_BARS = "▁▂▃▄▅▆▇█"

_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4g}"),
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


def view(run: Recorded, found: Sequence[Alert], *, width: int = 40) -> RenderableType:
    """Everything on one screen."""
    parts: list[RenderableType] = [_heading(run), _progress(run), _curves(run, width)]
    parts += [
        Text(f"{'ALARM' if a.level == 'alarm' else 'warning'}: {printable(a.text)}", style=_style(a)) for a in found
    ]
    if not found:
        parts.append(Text("nothing to be alarmed about", style="dim"))
    return Panel(Group(*parts), title=Text(printable(run.path.parent.parent.name or run.path)), title_align="left")


def spark(values: Sequence[float], width: int) -> str:
    """The latest values as a row of bars, from the lowest to the highest of them."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BARS[3] * len(shown)
    return "".join(_BARS[min(7, int((value - low) / (high - low) * 8))] for value in shown)


def _heading(run: Recorded) -> RenderableType:
    return Text("   ".join(f"{what}: {printable(value)}" for what, value in summary(run)[:3]))


def _progress(run: Recorded) -> RenderableType:
    total = run.start.get("max_steps")
    done = run.steps[-1]["step"] if run.steps else 0
    if not isinstance(total, int) or total <= 0:
        return Text("")
    line = Table.grid()  # a bar alone doesn't end its line
    line.add_row(ProgressBar(total=total, completed=min(done, total), width=60))
    return line


def _curves(run: Recorded, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for title, name, unit in _SHOWN:
        values = [value for _step, value in run.series(name)]
        if values:
            table.add_row(Text(title, style="bold"), Text(unit(values[-1])), Text(spark(values, width), style="green"))
    return table


def _level(alert: Alert) -> str:
    return "ALARM" if alert.level == "alarm" else "warning"


def _style(alert: Alert) -> str:
    return "bold red" if alert.level == "alarm" else "yellow"
