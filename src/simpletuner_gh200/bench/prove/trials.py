"""One arm trained once, through the command that a person types, and what its telemetry and summary say."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm, Summary
from simpletuner_gh200.config.environment import KEEP_SUMMARY, NO_BYTECODE, SUMMARY_FOLDER, TELEMETRY, for_child
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.telemetry.reading import Recorded, read_run

LOG = "training.log"
_SENDING = ("SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS", "SIMPLETUNER_WEBHOOK_CONFIG")
_UNSET = (NO_BYTECODE, SUMMARY_FOLDER, *_SENDING)
"""Without bytecode SimpleTuner takes a minute more; and no trial sends anything away."""

WARM_UP = 2
"""Steps at the start of a run that count for nothing, where there are more."""

Train = Callable[[Path, Path], Summary | None]
"""Trains a configuration, its output going to a log; returns what the first rank left, None where it left nothing."""


@dataclass(frozen=True)
class Trial:
    """One run of an arm. ``step``: median seconds of its steps; None where it failed."""

    ok: bool
    told: str
    """What shows that the arm was on, or why the run does not count."""
    seconds: float
    step: float | None = None
    data_wait: float | None = None
    peak_hbm: int | None = None
    steps: int = 0


def trial(arm: Arm, config: Path, steps: int, train: Train) -> Trial:
    """Train ``config`` and judge by what the run left, not by its exit code alone."""
    folder = config.parent
    shutil.rmtree(folder / "output", ignore_errors=True)
    started = time.monotonic()
    summary = train(config, folder / LOG)
    seconds = time.monotonic() - started
    if summary is None:
        return Trial(False, f"the run left no summary: {last_words(folder / LOG)}", seconds)
    if summary.get("status") != "completed" or int(summary.get("global_step") or 0) < steps:
        why = summary.get("reason") or summary.get("status")
        return Trial(False, f"reached step {summary.get('global_step')} of {steps}: {why}", seconds)
    on, told = arm.verdict(summary)
    if not on:
        return Trial(False, told, seconds)
    return _measured(folder / "output", told, seconds)


def _measured(output: Path, told: str, seconds: float) -> Trial:
    try:
        recorded = read_run(output)
    except GH200Error as missing:
        return Trial(False, missing.message, seconds)
    step = _median(recorded, "step_seconds")
    if step is None:
        return Trial(False, "its telemetry has no steps", seconds)
    held = [int(value) for _step, value in recorded.series("device/reserved")]
    return Trial(
        True,
        told,
        seconds,
        step=step,
        data_wait=_median(recorded, "data_wait_seconds"),
        peak_hbm=max(held) if held else None,
        steps=len(recorded.steps),
    )


def _median(recorded: Recorded, name: str) -> float | None:
    values = [value for _step, value in recorded.series(name)]
    kept = values[WARM_UP:] or values
    return statistics.median(kept) if kept else None


def by_command(config: Path, log: Path) -> Summary | None:
    """``gh200 train`` in a process of its own; telemetry listens in every arm, in stock too."""
    command = [sys.executable, "-m", "simpletuner_gh200", "train", "--config", str(config), "--no-plan"]
    environment = for_child({TELEMETRY: "1", "TOKENIZERS_PARALLELISM": "false"}, without=_UNSET)
    with tempfile.TemporaryDirectory(prefix="gh200-prove-") as folder, log.open("w", encoding="utf-8") as file:
        environment[KEEP_SUMMARY] = folder
        subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        left = sorted(Path(folder).glob("rank-*.json"))
        summary: Mapping[str, Any] | None = json.loads(left[0].read_text(encoding="utf-8")) if left else None
    return summary


def last_words(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "it has no log"
    return next((line[:300] for line in reversed(lines) if line), "its log is empty")
