"""Rounds of all arms, one after the other, so that noise and heat hit them alike; as many as the time allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm
from simpletuner_gh200.bench.prove.trials import Trial

MOST_ROUNDS = 5


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
        found = [trial.step for trial in self.trials.get(name, ()) if trial.ok and trial.step is not None]
        return statistics.median(found) if found else None

    def to_json(self) -> list[dict[str, Any]]:
        return [self._row(arm) for arm in self.arms]

    def _row(self, arm: Arm) -> dict[str, Any]:
        found = self.trials.get(arm.name, [])
        good = [trial for trial in found if trial.ok]
        step, stock = self.step(arm.name), self.step("stock")
        waits = [trial.data_wait for trial in good if trial.data_wait is not None]
        peaks = [trial.peak_hbm for trial in good if trial.peak_hbm is not None]
        bad = next((trial for trial in found if not trial.ok), None)
        status = "skip" if not found else "failed" if bad is not None else "ok"
        told = bad.told if bad is not None else good[0].told if good else self.skipped.get(arm.name, "")
        return {
            "name": arm.name,
            "title": arm.title,
            "status": status,
            "told": told,
            "step_s": step,
            "data_wait_s": statistics.median(waits) if waits else None,
            "peak_hbm": max(peaks) if peaks else None,
            "vs_stock": step / stock if step is not None and stock else None,
            "runs": [trial.step for trial in good],
            "settings": dict(arm.settings),
        }


NO_TIME = "no time left"


def compare(
    arms: Sequence[Arm],
    left_out: Mapping[str, str],
    run: Callable[[Arm], Trial],
    *,
    seconds: float,
    longest: float = 0.0,
    most: int = MOST_ROUNDS,
    tell: Callable[[str], None] = lambda _words: None,
    clock: Callable[[], float] = time.monotonic,
) -> Compared:
    """Run rounds of ``arms`` within ``seconds``. ``longest``: what a run took so far, before any arm has.

    A run is not begun that would probably not end in time. The first round takes what it gets; later ones are whole,
    each beginning with another arm.
    """
    started = clock()
    found = Compared(arms, skipped=dict(left_out))
    tried = [arm for arm in arms if arm.name not in left_out]
    taken: dict[str, float] = {}

    def left() -> float:
        return seconds - (clock() - started)

    def one(arm: Arm, number: int) -> None:
        tell(f"round {number}: {arm.title}")
        trial = run(arm)
        found.trials.setdefault(arm.name, []).append(trial)
        taken[arm.name] = max(trial.seconds, taken.get(arm.name, 0.0))
        if not trial.ok:
            tell(f"{arm.name} failed: {trial.told}")

    for arm in tried:
        if left() < max([longest, *taken.values()]):
            found.skipped[arm.name] = f"{NO_TIME}: a run takes about {max([longest, *taken.values()]):.0f} s"
            continue
        one(arm, 1)
    found.rounds = 1 if found.trials else 0
    running = [arm for arm in tried if arm.name in found.trials and arm.name not in found.failed]
    while running and found.rounds < most and left() >= sum(taken[arm.name] for arm in running):
        turn = found.rounds % len(running)
        for arm in (*running[turn:], *running[:turn]):
            one(arm, found.rounds + 1)
        found.rounds += 1
        running = [arm for arm in running if arm.name not in found.failed]
    if found.trials and not running:
        found.notes.append(f"{found.rounds} of at most {most} rounds: every arm that was tried has failed")
    elif found.rounds < most:
        found.notes.append(f"{found.rounds} of at most {most} rounds: there was no time for more; see --minutes")
    return found
