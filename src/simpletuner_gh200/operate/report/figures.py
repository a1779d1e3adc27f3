"""Which plots a run's records give: a title, what it tells, and its lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simpletuner_gh200.operate.report.marks import Line, plot
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Figure:
    """``svg`` is ready for the page."""

    title: str
    caption: str
    svg: str


def figures(run: Recorded) -> list[Figure]:
    """Every figure that the records have numbers for."""
    made = [
        _figure(run, "Loss", "Training loss of each optimizer step.", {"loss": "loss"}, _plain, from_zero=False),
        _figure(
            run,
            "Step time",
            "Wall time of an optimizer step, the first left out; data wait is its part before a batch was there.",
            {"whole step": "step_seconds", "compute": "compute_seconds", "data wait": "data_wait_seconds"},
            format_seconds,
            first=1,
        ),
        _share(run),
        _figure(
            run,
            "Host memory",
            "What could still be taken on the machine or in its container, and what this process held.",
            {"available": "host/available", "resident": "host/resident", "slabs": "slab_bytes"},
            format_bytes,
        ),
        _figure(
            run,
            "Device memory",
            "HBM in use and free, as NVML tells.",
            {"used": "device/used", "free": "device/free"},
            format_bytes,
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
        _figure(
            run,
            "Effective batch",
            "Samples per optimizer step, over all ranks.",
            {"effective batch": "effective_batch"},
            _plain,
        ),
        _hit_rates(run),
    ]
    return [figure for figure in made if figure is not None]


def _figure(
    run: Recorded,
    title: str,
    caption: str,
    names: dict[str, str],
    unit: Callable[[float], str],
    *,
    from_zero: bool = True,
    first: int = 0,
) -> Figure | None:
    lines = [Line(name, points[first:] or points) for name, path in names.items() if (points := run.series(path))]
    svg = plot(lines, label=title, unit=unit, from_zero=from_zero, binary=unit is format_bytes)
    return Figure(title, caption, svg) if svg else None


def _share(run: Recorded) -> Figure | None:
    whole = dict(run.series("step_seconds"))
    points = [(step, wait / whole[step]) for step, wait in run.series("data_wait_seconds") if whole.get(step)]
    svg = plot([Line("data wait", points)], label="Data wait", unit=_percent)
    return Figure("Data wait", "Share of each step spent waiting for data.", svg) if svg else None


def _hit_rates(run: Recorded) -> Figure | None:
    metrics = [record["metrics"] for record in run.steps if isinstance(record.get("metrics"), dict)]
    names = sorted({name for answer in metrics for name in answer if name.endswith("hit_rate")})
    lines = [Line(name, run.series(f"metrics/{name}")) for name in names]
    svg = plot(lines, label="Hit rates", unit=_percent)
    return Figure("Hit rates", "Share of reads that our caches answered from memory.", svg) if svg else None


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"
