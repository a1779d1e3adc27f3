"""Capturing a baseline: a short run with telemetry, and everything that says what it ran on, in one folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletuner_gh200.config import environment as variables
from simpletuner_gh200.config.files import take
from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import launching, preflight
from simpletuner_gh200.operate.baseline.compare import Estimate, describe, in_words
from simpletuner_gh200.operate.outcome import Outcome
from simpletuner_gh200.operate.report.page import summary
from simpletuner_gh200.telemetry.reading import FILE, Recorded, read_run
from simpletuner_gh200.telemetry.redact import redact_command
from simpletuner_gh200.telemetry.view import RunView

TELEMETRY = "telemetry.jsonl"
REPORT = "baseline_report.txt"
GPU_LOG = "nvidia_smi.log"
DOCTOR = "doctor.json"
RUN = "run"

_GPU_QUESTION = "timestamp,name,utilization.gpu,utilization.memory,memory.used,memory.total,power.draw,clocks.sm"

Runner = Callable[[launching.LaunchCommand], Outcome]


def capture(
    folder: Path,
    flags: Sequence[str],
    *,
    steps: int,
    doctor: Mapping[str, Any],
    nsys: bool = False,
    run: Runner = launching.run,
) -> Recorded:
    """Train ``steps`` optimizer steps with the given arguments into ``folder``; returns what was recorded."""
    _prepare(folder, nsys=nsys)
    planned = _command(folder, flags, steps=steps, nsys=nsys)
    (folder / DOCTOR).write_text(json.dumps(doctor, indent=2) + "\n", encoding="utf-8")
    with _gpu_log(folder / GPU_LOG):
        ended = run(planned)
    if ended.exit_code:
        raise RunFailed(
            f"the run ended with exit code {ended.exit_code}", remedy=f"see its output; {folder} has no baseline"
        )
    recorded = read_run(folder / RUN)
    shutil.copyfile(folder / RUN / FILE, folder / TELEMETRY)
    (folder / TELEMETRY).chmod(0o600)
    (folder / REPORT).write_text(report_text(recorded, planned.command), encoding="utf-8")
    return recorded


def report_text(run: Recorded, command: Sequence[str]) -> str:
    """``baseline_report.txt``: what a person reads first."""
    lines = ["baseline", "", f"command: {' '.join(redact_command(command))}", ""]
    lines += [f"{what}: {value}" for what, value in summary(RunView(run))]
    lines += ["", "medians after warm-up, with their standard error:"]
    for name, found, _mean in describe(run):
        lines.append(f"  {name}: " + (_estimate(name, found) if found else "not recorded"))
    lines += ["", "versions:"]
    versions = run.start.get("versions")
    lines += [f"  {name}: {version}" for name, version in (versions if isinstance(versions, dict) else {}).items()]
    return "\n".join(lines) + "\n"


def _estimate(name: str, found: Estimate) -> str:
    return f"{in_words(name, found.value)} ± {in_words(name, found.error)}"


def _prepare(folder: Path, *, nsys: bool) -> None:
    if (folder / REPORT).exists() or (folder / RUN).exists():
        raise UsageError(f"{folder} holds a baseline already", remedy="name another folder with --output, or remove it")
    if nsys and shutil.which("nsys") is None:
        raise UsageError(
            "--nsys: nsys is not installed here", remedy="install NVIDIA Nsight Systems, or leave --nsys out"
        )
    folder.mkdir(parents=True, exist_ok=True)


def _command(folder: Path, flags: Sequence[str], *, steps: int, nsys: bool) -> launching.LaunchCommand:
    """The launch of `gh200 train` with these arguments, ending after ``steps`` and writing into the baseline."""
    config, rest = take(list(flags), "config")
    env_name, rest = take(rest, "env")
    rest = [*rest, f"--max_train_steps={steps}", "--num_train_epochs=0", f"--output_dir={(folder / RUN).absolute()}"]
    preflight.check_release()
    checked = preflight.check_configuration(explicit=config, env_name=env_name, flags=rest)
    planned = checked.launch
    command = planned.command
    if nsys:
        trace = ["nsys", "profile", f"--output={(folder / 'trace').absolute()}", "--trace=cuda,nvtx,osrt"]
        command = (*trace, "--force-overwrite=true", *command)
    return launching.LaunchCommand(command, {**planned.environment, variables.TELEMETRY: "1"}, planned.notices)


@contextmanager
def _gpu_log(path: Path) -> Iterator[None]:
    """nvidia-smi once a second beside the run, where there is one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    with path.open("wb") as log:
        process = subprocess.Popen(
            [tool, f"--query-gpu={_GPU_QUESTION}", "--format=csv", "-l", "1"], stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=10)
