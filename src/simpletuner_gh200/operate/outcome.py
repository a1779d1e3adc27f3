"""What became of a run: the one answer that the exit code, the closing line and ``--json`` are made from."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import switched_off
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.supervision import Watched, rank_order
from simpletuner_gh200.seams.preemption import ASKING, TRY_AGAIN


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code to return, and each rank's summary."""

    exit_code: int
    summaries: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None
    """What stopped it, where something did."""
    phase: str | None = None
    """What it was at last, in words; None if no rank got as far as to say so."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The first rank's; empty where none was left."""
        return self.summaries[0] if self.summaries else {}


def outcome_of(watched: Watched) -> Outcome:
    """Judged by what the ranks reported, not by 0 alone."""
    summaries = [watched.summaries[rank] for rank in sorted(watched.summaries, key=rank_order)]
    return Outcome(_exit_code(watched, summaries), summaries, watched.signal, watched.phase)


def _exit_code(watched: Watched, summaries: list[dict[str, Any]]) -> int:
    returned, interrupted = watched.returned, watched.signal
    completed = bool(summaries) and all(summary["status"] == "completed" for summary in summaries)
    failed = any(summary["status"] == "failed" for summary in summaries)
    if any(summary.get("exit_code") == TRY_AGAIN for summary in summaries):
        return TRY_AGAIN
    if interrupted in ASKING and completed and len(summaries) >= len(watched.phases):
        return 0  # asked for a checkpoint and an end when both were there already
    if interrupted == signal.SIGUSR1:
        if not failed:
            return TRY_AGAIN
        returned, interrupted = 1, None  # a checkpoint that failed would fail again, as often as it is requeued
    if interrupted is not None:
        return 128 + interrupted
    if returned < 0:
        return 128 - returned
    if returned == 0 and (completed or (not summaries and switched_off())):
        return 0  # stock SimpleTuner leaves no summary
    # A rank's own code is truer than the launcher's, which knows only that something failed.
    return 2 if any(summary.get("exit_code") == 2 for summary in summaries) else returned or 1


def code_with_again_file(outcome: Outcome, file: Path | None) -> int:
    """For a scheduler that ends the other nodes at any code but 0: "try again" is a file instead."""
    if file is None or outcome.exit_code != TRY_AGAIN:
        return outcome.exit_code
    try:
        file.touch()
    except OSError as refused:
        raise UsageError(
            f"--again-file {file}: {refused}", remedy="name a file in a folder that is there, on a shared file system"
        ) from None
    return 0
