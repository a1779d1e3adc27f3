"""Which plots a run's records give: a title, what it tells, and its lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpletuner_gh200.operate.closing import PHASES
from simpletuner_gh200.operate.report.marks import Line, plot, sensible_top, smoothed, stacked
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import counted, format_bytes, format_seconds

ENOUGH_TO_SMOOTH = 20
MOST_RANKS = 6
"""That are drawn each by itself; of more, those with the longest waits."""


@dataclass(frozen=True)
class Figure:
    """``svg`` is ready for the page."""

    title: str
    caption: str
    svg: str


def figures(run: Recorded, planned: Mapping[str, float] | None = None, ranks: Sequence[Recorded] = ()) -> list[Figure]:
    """Every figure that the records have numbers for. ``planned``: bytes that were foreseen, by series."""
    foreseen = planned or {}
    made = [
        _loss(run),
        _step_time(run),
        _share(run),
        _by_rank(ranks),
        _figure(
            run,
            "Host memory",
            "What could still be taken on the machine or in its container, and what this process held.",
            {"available": "host/available", "resident": "host/resident", "slabs": "slab_bytes"},
            format_bytes,
            foreseen=foreseen.get("host/resident"),
        ),
        _figure(
            run,
            "Device memory",
            "HBM in use and free, as NVML tells.",
            {"used": "device/used", "free": "device/free"},
            format_bytes,
            foreseen=foreseen.get("device/used"),
        ),
        _figure(
            run,
            "Model state",
            "Optimizer state and EMA in Grace, what of it stayed in HBM, and what torch used of the reserve.",
            {
                "in Grace": "features/state/bytes",
                "in HBM": "features/state/hbm_bytes",
                "reserve in use": "features/state/oom_reserve/used",
            },
            format_bytes,
        ),
        _figure(
            run,
            "Chip-to-chip link",
            "Bytes per second over the link between CPU and GPU, as NVML tells.",
            {"to the device": "device/link_in_per_second", "to the host": "device/link_out_per_second"},
            format_bytes,
        ),
        _ramp(run),
        _figure(
            run,
            "Learning rate",
            "As the optimizer used it.",
            {"learning rate": "learning_rate"},
            _plain,
        ),
        _hit_rates(run),
    ]
    return [figure for figure in made if figure is not None]


def time_line(run: Recorded) -> str:
    """Where the time of the whole run went, as one bar; nothing before its end."""
    seconds = run.end.get("seconds")
    shown: dict[str, float] = {}
    for phase, length in seconds.items() if isinstance(seconds, Mapping) else ():
        if isinstance(length, int | float) and 0 < length < 1e9:
            name = PHASES.get(str(phase), str(phase))
            shown[name] = shown.get(name, 0.0) + length
    return stacked(
        [(f"{name} {format_seconds(length)}", length) for name, length in shown.items()], label="Where the time went"
    )


def _figure(
    run: Recorded,
    title: str,
    caption: str,
    names: Mapping[str, str],
    unit: Callable[[float], str],
    *,
    foreseen: float | None = None,
) -> Figure | None:
    lines = [Line(name, points) for name, path in names.items() if (points := run.series(path))]
    if lines and foreseen:
        lines.append(Line("planned for this run", [(0, foreseen)], level=True))
    svg = plot(lines, label=title, unit=unit, binary=unit is format_bytes)
    return Figure(title, caption, svg) if svg else None


def _loss(run: Recorded) -> Figure | None:
    points = run.series("loss")
    if len(points) < ENOUGH_TO_SMOOTH:
        svg, caption = (
            plot([Line("loss", points)], label="Loss", unit=_plain, from_zero=False),
            "of each optimizer step",
        )
    else:
        lines = [Line("each step", points, raw=True), Line("smoothed", smoothed(points))]
        svg = plot(lines, label="Loss", unit=_plain, from_zero=False)
        caption = "smoothed; behind it that of each optimizer step"
    return Figure("Loss", f"Training loss, {caption}.", svg) if svg else None


def _step_time(run: Recorded) -> Figure | None:
    names = {"whole step": "step_seconds", "compute": "compute_seconds", "data wait": "data_wait_seconds"}
    if any(value > 0 for _step, value in run.series("save_seconds")):
        names["saving"] = "save_seconds"
    lines = [Line(name, points[1:] or points) for name, path in names.items() if (points := run.series(path))]
    whole = [value for line in lines[:1] for _step, value in line.points]
    top = sensible_top(whole)
    svg = plot(lines, label="Step time", unit=format_seconds, top=top)
    caption = "Wall time of an optimizer step, the first left out; data wait is its part before a batch was there."
    if top is not None:
        beyond = sum(value > top for value in whole)
        caption += f" {counted(beyond, 'step')} took longer than is drawn, up to {format_seconds(max(whole))}."
    return Figure("Step time", caption, svg) if svg else None


def _share(run: Recorded) -> Figure | None:
    svg = plot([Line("data wait", _waiting(run))], label="Data wait", unit=_percent)
    return Figure("Data wait", "Share of each step, saving left out, spent waiting for data.", svg) if svg else None


def _waiting(run: Recorded) -> list[tuple[float, float]]:
    saving = dict(run.series("save_seconds"))
    whole = {step: length - saving.get(step, 0.0) for step, length in run.series("step_seconds")}
    return [(step, wait / whole[step]) for step, wait in run.series("data_wait_seconds") if whole.get(step, 0) > 0]


def _by_rank(ranks: Sequence[Recorded]) -> Figure | None:
    if len(ranks) < 2:
        return None
    waits = {rank.rank: _waiting(rank) for rank in ranks}
    longest = sorted(waits, key=lambda number: -sum(share for _step, share in waits[number]))[:MOST_RANKS]
    lines = [Line(f"rank {number}", waits[number]) for number in sorted(longest)]
    svg = plot(lines, label="Data wait by rank", unit=_percent)
    left_out = len(waits) - len(lines)
    told = f" {counted(left_out, 'rank')} with shorter waits left out." if left_out else ""
    return Figure("Data wait by rank", f"Share of each step; the ranks wait for the one that waits longest.{told}", svg)


def _ramp(run: Recorded) -> Figure | None:
    svg = plot(
        [Line("effective batch", run.series("effective_batch"), steps=True)], label="Effective batch", unit=_plain
    )
    return Figure("Effective batch", "Samples per optimizer step, over all ranks.", svg) if svg else None


def _hit_rates(run: Recorded) -> Figure | None:
    metrics: list[Mapping[str, Any]] = [r["metrics"] for r in run.steps if isinstance(r.get("metrics"), dict)]
    names = sorted({name for answer in metrics for name in answer if name.endswith("hit_rate")})
    lines = [Line(name, run.series(f"metrics/{name}")) for name in names]
    svg = plot(lines, label="Hit rates", unit=_percent)
    return Figure("Hit rates", "Share of all reads so far that our caches answered from memory.", svg) if svg else None


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"
