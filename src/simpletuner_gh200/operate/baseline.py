"""Performance baselines: capture one, and say later whether another run is better, the same or worse.

A baseline is one folder: a short run with telemetry, and everything that says what it ran on.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, stdev
from typing import Any, Literal, NamedTuple

from simpletuner_gh200.config import environment as variables
from simpletuner_gh200.config.files import take
from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import launching, preflight
from simpletuner_gh200.operate.ending import Outcome
from simpletuner_gh200.operate.report.page import summary
from simpletuner_gh200.operate.run_folder import configuration_of, output_of
from simpletuner_gh200.telemetry.numbers import data_wait_shares, plain
from simpletuner_gh200.telemetry.reading import FILE, Point, Recorded, read_run
from simpletuner_gh200.telemetry.redact import redact_command
from simpletuner_gh200.telemetry.view import RunView
from simpletuner_gh200.units import format_bytes

# -- comparing -----------------------------------------------------------------------------------------------

BLOCKS = 10
"""Neighbouring steps are alike (a busy neighbour slows many in a row), so noise is measured between blocks of them."""
WARM_UP = 0.1
FEWEST = 4
"""Steps, after the warm-up, below which nothing can be said."""
CERTAIN = 2.0
"""So many standard errors must lie beyond the tolerance."""


class Metric(NamedTuple):
    """``share`` metrics are compared by their difference, others by their ratio."""

    curve: Callable[[Recorded], list[Point]]
    unit: Callable[[float], str] = plain
    more_is_better: bool = False
    share: bool = False


def _series(name: str) -> Callable[[Recorded], list[Point]]:
    return partial(Recorded.series, name=name)


METRICS = {
    "throughput (samples/s)": Metric(_series("samples_per_second"), more_is_better=True),
    "data wait (share of a step)": Metric(data_wait_shares, share=True),
    "HBM in use (bytes)": Metric(_series("device/used"), format_bytes),
    "memory of the process (bytes)": Metric(_series("host/resident"), format_bytes),
}


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """Standard error, from the spread between blocks."""
    steps: int


@dataclass(frozen=True)
class MetricChange:
    """``change`` is relative to the first run (for shares: the difference); ``error`` is its standard error."""

    metric: str
    before: float | None
    after: float | None
    change: float | None = None
    error: float | None = None
    judgement: Literal["better", "same", "worse", "unknown"] = "unknown"
    reason: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """For a table: metric, before, after, change or why there is none, judgement."""
        unit = METRICS[self.metric].unit
        before, after = ("-" if value is None else unit(value) for value in (self.before, self.after))
        change = f"{self.change:+.1%} ± {self.error:.1%}" if self.change is not None else self.reason
        return self.metric, before, after, change, self.judgement


def compare(before: Recorded, after: Recorded, tolerance: float) -> list[MetricChange]:
    """Every metric that could be compared, and those that could not, with the reason."""
    first, second = describe(before), describe(after)
    return [_compare(name, first[name], second[name], tolerance) for name in METRICS]


def regressed(found: Sequence[MetricChange]) -> bool:
    return any(row.judgement == "worse" for row in found)


def pair(first: Path, second: Path | None) -> tuple[Path, Path]:
    """What is compared: two telemetry files, or the baseline beside the records of one run and that run."""
    if second is not None:
        return first, second
    kept = first.with_name(BESIDE) / TELEMETRY
    if not kept.is_file():
        remedy = "capture one with `gh200 baseline capture`, or name two runs"
        raise UsageError(f"no baseline next to {first}", remedy=remedy)
    return kept, first


def describe(run: Recorded) -> dict[str, Estimate | None]:
    return {name: estimate([value for _step, value in metric.curve(run)]) for name, metric in METRICS.items()}


def estimate(values: Sequence[float]) -> Estimate | None:
    """The median after warm-up, and how sure it is; None where there are too few steps."""
    settled = list(values[math.ceil(len(values) * WARM_UP) :])
    if len(settled) < FEWEST:
        return None
    count = min(BLOCKS, len(settled) // 2)
    size = len(settled) / count
    blocks = [median(settled[round(n * size) : round((n + 1) * size)]) for n in range(count)]
    return Estimate(median(settled), stdev(blocks) / math.sqrt(count), len(settled))


def parse_tolerance(text: str) -> float:
    """``5%`` and ``0.05`` are the same."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {text!r} is not a share", remedy="write 5% or 0.05, below 100%")
    return value


def _compare(name: str, old: Estimate | None, new: Estimate | None, tolerance: float) -> MetricChange:
    metric, values = METRICS[name], (old.value if old else None, new.value if new else None)
    if old is None or new is None:
        which = "the first" if old is None else "the second"
        return MetricChange(name, *values, reason=f"{which} run has too few steps with this number")
    if metric.share:
        change, error = new.value - old.value, math.hypot(old.error, new.error)
    elif old.value == 0:
        return MetricChange(name, *values, reason="the first run has none of it")
    else:
        ratio = new.value / old.value
        spread = math.hypot(old.error / old.value, new.error / new.value if new.value else 0.0)
        change, error = ratio - 1, abs(ratio) * spread
    if abs(change) - CERTAIN * error <= tolerance:
        return MetricChange(name, *values, change, error, "same")
    return MetricChange(name, *values, change, error, "better" if (change > 0) == metric.more_is_better else "worse")


# -- capturing -----------------------------------------------------------------------------------------------

BESIDE = "baseline"
"""A folder beside a run's records."""
TELEMETRY = "telemetry.jsonl"
REPORT = "baseline_report.txt"
GPU_LOG = "nvidia_smi.log"
DOCTOR = "doctor.json"
RUN = "run"

_GPU_QUESTION = "timestamp,name,utilization.gpu,utilization.memory,memory.used,memory.total,power.draw,clocks.sm"


def meant(words: Sequence[str], output: Path | None) -> tuple[list[str], Path]:
    """Flags for `gh200 train`, and the folder of the baseline, from ``[RUN] [FLAGS]``: beside the run's records."""
    flags = list(words)
    if flags and not flags[0].startswith("-"):
        run = Path(flags.pop(0))
        config = configuration_of(run) if run.exists() else None
        if config is None:
            remedy = "name its project folder or its configuration, or put --config after --"
            raise UsageError(f"{run}: there is no training configuration", remedy=remedy)
        flags = [f"--config={config}", *flags]
    named, _rest = take(flags, "config")
    config = Path(named) if named else configuration_of(Path())
    beside = output_of(config) / FILE.parent if config is not None and config.is_file() else Path()
    return flags, output or beside / BESIDE


def capture(
    folder: Path,
    flags: Sequence[str],
    *,
    steps: int,
    doctor: Mapping[str, Any],
    nsys: bool = False,
    run: Callable[[launching.LaunchCommand], Outcome] = launching.run,
) -> Recorded:
    """Train ``steps`` optimizer steps with the given arguments into ``folder``; returns what was recorded."""
    if (folder / REPORT).exists() or (folder / RUN).exists():
        raise UsageError(f"{folder} holds a baseline already", remedy="name another folder with --output, or remove it")
    if nsys and shutil.which("nsys") is None:
        remedy = "install NVIDIA Nsight Systems, or leave --nsys out"
        raise UsageError("--nsys: nsys is not installed here", remedy=remedy)
    folder.mkdir(parents=True, exist_ok=True)
    launch = _launch(folder, flags, steps=steps, nsys=nsys)
    (folder / DOCTOR).write_text(json.dumps(doctor, indent=2) + "\n", encoding="utf-8")
    with _gpu_log(folder / GPU_LOG):
        outcome = run(launch)
    if outcome.exit_code:
        words = f"the run ended with exit code {outcome.exit_code}"
        raise RunFailed(words, remedy=f"see its output; {folder} has no baseline")
    recorded = read_run(folder / RUN)
    shutil.copyfile(folder / RUN / FILE, folder / TELEMETRY)
    (folder / TELEMETRY).chmod(0o600)
    (folder / REPORT).write_text("\n".join([*_report(recorded, launch.command), ""]), encoding="utf-8")
    return recorded


def _report(run: Recorded, command: Sequence[str]) -> Iterator[str]:
    """``baseline_report.txt``: what users read first."""
    yield from ("baseline", "", f"command: {' '.join(redact_command(command))}", "")
    yield from (f"{what}: {value}" for what, value in summary(RunView(run)))
    yield from ("", "medians after warm-up, with their standard error:")
    for name, found in describe(run).items():
        unit = METRICS[name].unit
        yield f"  {name}: " + (f"{unit(found.value)} ± {unit(found.error)}" if found else "not recorded")
    yield from ("", "versions:")
    versions = run.start.get("versions")
    yield from (f"  {name}: {version}" for name, version in (versions if isinstance(versions, dict) else {}).items())


def _launch(folder: Path, flags: Sequence[str], *, steps: int, nsys: bool) -> launching.LaunchCommand:
    """The launch of `gh200 train` with these arguments, ending after ``steps`` and writing into the baseline."""
    config, rest = take(list(flags), "config")
    env_name, rest = take(rest, "env")
    rest = [*rest, f"--max_train_steps={steps}", "--num_train_epochs=0", f"--output_dir={(folder / RUN).absolute()}"]
    launch = preflight.check_configuration(explicit=config, env_name=env_name, flags=rest).launch
    trace = ("nsys", "profile", f"--output={(folder / 'trace').absolute()}", "--trace=cuda,nvtx,osrt")
    command = (*trace, "--force-overwrite=true", *launch.command) if nsys else launch.command
    return launching.LaunchCommand(command, {**launch.environment, variables.TELEMETRY: "1"}, launch.notices)


@contextmanager
def _gpu_log(path: Path) -> Iterator[None]:
    """nvidia-smi once a second during the run, where there is one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    with path.open("wb") as log:
        command = [tool, f"--query-gpu={_GPU_QUESTION}", "--format=csv", "-l", "1"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=10)
