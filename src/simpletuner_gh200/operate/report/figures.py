"""Which pictures a run's records give: a title, what it tells, and its lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from simpletuner_gh200.draw.charts import Bar, Line, Picture, Piece, bars, plot, sensible_top, smoothed
from simpletuner_gh200.operate.ending import by_phase
from simpletuner_gh200.telemetry.numbers import cache_reads, data_wait_shares, hit_rates, percent, plain
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.view import RunView
from simpletuner_gh200.units import counted, format_bytes, format_seconds

ENOUGH_TO_SMOOTH = 20
MOST_RANKS = 6
"""That are drawn each by itself; of more, those with the longest waits."""


class Figure(NamedTuple):
    title: str
    caption: str
    picture: Picture


class _Plot(NamedTuple):
    """A figure of plain series: name -> path in the records."""

    title: str
    caption: str
    series: Mapping[str, str]
    unit: Callable[[float], str]
    foreseen: str = ""
    """The series for which a plan may have said a value."""
    steps: bool = False
    """Drawn in steps: it stays until it changes."""


_MEMORY = (
    _Plot(
        "Host memory",
        "What could still be taken on the machine or in its container, and what this process held.",
        {"available": "host/available", "resident": "host/resident", "slabs": "slab_bytes"},
        format_bytes,
        foreseen="host/resident",
    ),
    _Plot(
        "Device memory",
        "HBM in use and free, as NVML reports it.",
        {"used": "device/used", "free": "device/free"},
        format_bytes,
        foreseen="device/used",
    ),
    _Plot(
        "Model state",
        "Optimizer state and EMA in Grace, what of it stayed in HBM, and what torch used of the reserve.",
        {
            "in Grace": "features/state/bytes",
            "in HBM": "features/state/hbm_bytes",
            "reserve in use": "features/state/oom_reserve/used",
        },
        format_bytes,
    ),
    _Plot(
        "Chip-to-chip link",
        "Bytes per second over the link between CPU and GPU, as NVML reports it.",
        {"to the device": "device/link_in_per_second", "to the host": "device/link_out_per_second"},
        format_bytes,
    ),
)
_SCHEDULE = (
    _Plot(
        "Effective batch",
        "Samples per optimizer step, over all ranks.",
        {"effective batch": "effective_batch"},
        plain,
        steps=True,
    ),
    _Plot("Learning rate", "As the optimizer used it.", {"learning rate": "learning_rate"}, plain),
)

_Made = tuple[str, str, Picture | None]


def figures(view: RunView, foreseen: Mapping[str, float]) -> list[Figure]:
    """Every figure that the records have numbers for. ``foreseen``: bytes that were planned, by series."""
    run = view.run
    waits = plot([Line("data wait", data_wait_shares(run))], label="Data wait", unit=percent)
    made: list[_Made] = [
        _loss(run),
        _step_time(run),
        ("Data wait", "Share of each step, saving left out, spent waiting for data.", waits),
        _by_rank([run, *view.others]),
        *(_series(run, each, foreseen) for each in (*_MEMORY, *_SCHEDULE)),
        _hit_rates(run),
    ]
    return [Figure(title, caption, picture) for title, caption, picture in made if picture is not None]


def time_line(run: Recorded) -> str:
    """Where the time of the whole run went, as one bar; nothing before its end."""
    seconds = run.end.get("seconds")
    shown = by_phase(seconds if isinstance(seconds, Mapping) else {})
    whole = sum(shown.values())
    if not whole:
        return ""
    words = {name: f"{name} {format_seconds(length)}" for name, length in shown.items()}
    pieces = [Piece(words[name], length, number, words[name]) for number, (name, length) in enumerate(shown.items())]
    return bars([Bar(pieces, whole)], label="Where the time went").on_page()


def _series(run: Recorded, wanted: _Plot, foreseen: Mapping[str, float]) -> _Made:
    lines = [
        Line(name, points, steps=wanted.steps) for name, path in wanted.series.items() if (points := run.series(path))
    ]
    if lines and foreseen.get(wanted.foreseen):
        lines.append(Line("planned for this run", [(0, foreseen[wanted.foreseen])], level=True))
    binary = wanted.unit is format_bytes
    return wanted.title, wanted.caption, plot(lines, label=wanted.title, unit=wanted.unit, binary=binary)


def _loss(run: Recorded) -> _Made:
    points = run.series("loss")
    lines, caption = [Line("loss", points)], "of each optimizer step"
    if len(points) >= ENOUGH_TO_SMOOTH:
        lines = [Line("each step", points, raw=True), Line("smoothed", smoothed(points))]
        caption = "smoothed; behind it that of each optimizer step"
    return "Loss", f"Training loss, {caption}.", plot(lines, label="Loss", unit=plain, from_zero=False)


def _step_time(run: Recorded) -> _Made:
    names = {"whole step": "step_seconds", "compute": "compute_seconds", "data wait": "data_wait_seconds"}
    if any(value > 0 for _step, value in run.series("save_seconds")):
        names["saving"] = "save_seconds"
    lines = [Line(name, points[1:] or points) for name, path in names.items() if (points := run.series(path))]
    whole = [value for line in lines[:1] for _step, value in line.points]
    top = sensible_top(whole)
    caption = "Wall time of an optimizer step, the first left out; data wait is its part before a batch was there."
    if top is not None:
        beyond = sum(value > top for value in whole)
        caption += f" {counted(beyond, 'step')} took longer than is drawn, up to {format_seconds(max(whole))}."
    return "Step time", caption, plot(lines, label="Step time", unit=format_seconds, top=top)


def _by_rank(ranks: Sequence[Recorded]) -> _Made:
    waits = {rank.rank: data_wait_shares(rank) for rank in ranks}
    longest = sorted(waits, key=lambda number: -sum(share for _step, share in waits[number]))[:MOST_RANKS]
    lines = [Line(f"rank {number}", waits[number]) for number in sorted(longest)]
    left_out = len(waits) - len(lines)
    more = f" {counted(left_out, 'rank')} with shorter waits left out." if left_out else ""
    picture = plot(lines, label="Data wait by rank", unit=percent) if len(ranks) > 1 else None
    return "Data wait by rank", f"Share of each step; the ranks wait for the one that waits longest.{more}", picture


def _hit_rates(run: Recorded) -> _Made:
    caches = sorted({name for step in run.steps for name in cache_reads(step)})
    lines = [Line(name, hit_rates(run, name), raw=True) for name in caches]
    lines = [each for line in lines for each in (line, Line(line.name, smoothed(line.points)))]
    caption = "Share of each step's reads that our caches answered from memory, smoothed."
    return "Hit rates", caption, plot(lines, label="Hit rates", unit=percent)
