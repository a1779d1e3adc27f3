"""Arms trained through the command that users type, in rounds, and what their telemetry and summaries say."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm, Summary
from simpletuner_gh200.config.environment import TELEMETRY
from simpletuner_gh200.demo.run import train_by_command
from simpletuner_gh200.errors import GH200Error, RunFailed
from simpletuner_gh200.telemetry.reading import Recorded, read_run

LOG = "training.log"
_SENDING = ("SIMPLETUNER_PUBLISH_FINAL_ARTIFACTS", "SIMPLETUNER_WEBHOOK_CONFIG")
"""No trial sends anything away."""

WARM_UP = 2
"""Steps at the start of a run that count for nothing, where there are more."""
MOST_ROUNDS = 5
NO_TIME = "no time left"

Train = Callable[[Path, Path], Summary | None]
"""Trains a configuration, its output going to a log; returns what the first rank left, None where it left nothing."""


@dataclass(frozen=True)
class Trial:
    """One run of an arm. ``step``: median seconds of its steps; None where it failed."""

    ok: bool
    reason: str
    """What shows that the arm was on, or why the run does not count."""
    seconds: float
    step: float | None = None
    data_wait: float | None = None
    peak_hbm: int | None = None


def trial(arm: Arm, config: Path, steps: int, train: Train) -> Trial:
    """Train ``config`` and judge by what the run left, not by its exit code alone."""
    output, log = config.parent / "output", config.parent / LOG
    shutil.rmtree(output, ignore_errors=True)
    started = time.monotonic()
    summary = train(config, log)
    seconds = time.monotonic() - started
    try:
        shown, recorded = _judged(arm, summary, steps, output, log)
    except GH200Error as failed:
        return Trial(False, failed.message, seconds)
    peak = max((int(value) for _step, value in recorded.series("device/reserved")), default=None)
    waited = _median(recorded, "data_wait_seconds")
    return Trial(True, shown, seconds, _median(recorded, "step_seconds"), waited, peak)


def _judged(arm: Arm, summary: Summary | None, steps: int, output: Path, log: Path) -> tuple[str, Recorded]:
    """What shows that the arm was on, and its telemetry; raises why the run does not count."""
    if summary is None:
        raise RunFailed(f"the run left no summary: {_last_words(log)}")
    if summary.get("status") != "completed" or int(summary.get("global_step") or 0) < steps:
        why = summary.get("reason") or summary.get("status")
        raise RunFailed(f"reached step {summary.get('global_step')} of {steps}: {why}")
    on, shown = arm.verdict(summary)
    recorded = read_run(output) if on else None
    if recorded is None or not recorded.series("step_seconds"):
        raise RunFailed("its telemetry has no steps" if on else shown)
    return shown, recorded


def _median(recorded: Recorded, name: str) -> float | None:
    values = [value for _step, value in recorded.series(name)]
    return _middle(values[WARM_UP:] or values)


def _middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def by_command(config: Path, log: Path) -> Summary | None:
    """``gh200 train`` in a process of its own; telemetry listens in every arm, in stock too."""
    return train_by_command(config, log, "--no-plan", environment={TELEMETRY: "1"}, without=_SENDING)


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "its log is empty")


@dataclass
class Compared:
    """Every trial by arm; ``skipped``: why an arm has none."""

    arms: Sequence[Arm]
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.trials.items() if any(not trial.ok for trial in found)]

    @property
    def out_of_time(self) -> list[str]:
        return [name for name, why in self.skipped.items() if why.startswith(NO_TIME)]

    def step(self, name: str) -> float | None:
        """Median over the rounds."""
        return _middle(trial.step for trial in self.trials.get(name, ()) if trial.ok)

    def row(self, arm: Arm) -> dict[str, Any]:
        found = self.trials.get(arm.name, [])
        good, bad = [trial for trial in found if trial.ok], [trial for trial in found if not trial.ok]
        step, stock = self.step(arm.name), self.step("stock")
        return {
            "name": arm.name,
            "title": arm.title,
            "status": "failed" if bad else "ok" if good else "skip",
            "told": (bad or good)[0].reason if found else self.skipped.get(arm.name, ""),
            "step_s": step,
            "data_wait_s": _middle(trial.data_wait for trial in good),
            "peak_hbm": max((trial.peak_hbm for trial in good if trial.peak_hbm is not None), default=None),
            "vs_stock": step / stock if step is not None and stock else None,
            "runs": [trial.step for trial in good],
            "settings": dict(arm.settings),
        }


def compare(
    arms: Sequence[Arm],
    left_out: Mapping[str, str],
    run: Callable[[Arm], Trial],
    *,
    seconds: float,
    longest: float = 0.0,
    most: int = MOST_ROUNDS,
    report: Callable[[str], None] = lambda _words: None,
    clock: Callable[[], float] = time.monotonic,
) -> Compared:
    """Rounds of ``arms``, one after the other, so that noise and heat hit them alike, within ``seconds``.

    A run is not begun that would probably not end in time; ``longest``: what one took so far, before any arm has. The
    first round takes what it gets; later ones are whole, each beginning with another arm.
    """
    until = clock() + seconds
    found = Compared(arms, skipped=dict(left_out))
    taken: dict[str, float] = {}
    running = [arm for arm in arms if arm.name not in left_out]
    while running and found.rounds < most:
        if found.rounds and until - clock() < sum(taken[arm.name] for arm in running):
            break
        turn = found.rounds % len(running)
        for arm in (*running[turn:], *running[:turn]):
            needed = max([longest, *taken.values()])
            if not found.rounds and until - clock() < needed:
                found.skipped[arm.name] = f"{NO_TIME}: a run takes about {needed:.0f} s"
                continue
            report(f"round {found.rounds + 1}: {arm.title}")
            trial = run(arm)
            found.trials.setdefault(arm.name, []).append(trial)
            taken[arm.name] = max(trial.seconds, taken.get(arm.name, 0.0))
            if not trial.ok:
                report(f"{arm.name} failed: {trial.reason}")
        running = [arm for arm in running if arm.name in found.trials and arm.name not in found.failed]
        found.rounds += bool(found.trials)
    if found.trials and not running:
        found.notes.append(f"{found.rounds} of at most {most} rounds: every arm that was tried has failed")
    elif found.rounds < most:
        found.notes.append(f"{found.rounds} of at most {most} rounds: there was no time for more; see --minutes")
    return found
