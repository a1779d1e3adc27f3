"""Filling while training runs: one quiet job per process, which never ends a run and stops within a file's time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Literal

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.pace import BackgroundPace, Effort, background_effort
from simpletuner_gh200.units import format_seconds

logger = logging.getLogger("simpletuner_gh200")

State = Literal["waiting", "running", "done", "stopped", "failed", "left behind"]

SILENCE_SECONDS = 300.0
"""After which a job that was told to end, and gives no sign of life, is not waited for: a file system that hangs."""

_left_behind: list[str] = []


def left_behind() -> tuple[str, ...]:
    """The jobs of this process that did not end. Python itself would wait for threads that they have started."""
    return tuple(_left_behind)


class BackgroundJob:
    """``work`` is handed the pace it has to keep; what it raises is said, and costs only what it had left to do."""

    def __init__(self, work: Callable[[BackgroundPace, Effort], None], *, name: str) -> None:
        self.effort = background_effort(len(os.sched_getaffinity(0)))
        self.state: State = "waiting"
        self.seconds = 0.0
        self._pace = BackgroundPace(self.effort.share)
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def begun(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self.state = "running"
        self._thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._pace.begin()
            self._work(self._pace, self.effort)
            self.state = "stopped" if self._pace.ended else "done"
        except (GH200Error, OSError) as failed:
            self._fail(str(failed))
        except Exception as failed:  # noqa: BLE001 - said in full; memory that runs out here must not end a run either
            self._fail(f"{type(failed).__name__}: {failed}", failed)
        finally:
            self.seconds = time.monotonic() - started

    def _fail(self, why: str, unexpected: Exception | None = None) -> None:
        self.state = "failed"
        logger.warning("gh200: what is not in memory yet is read from disk: %s", why, exc_info=unexpected)

    def end(self) -> None:
        """Tell it to stop at its next file, or not to begin."""
        self._pace.end()
        if not self.begun:
            self.state = "stopped"

    def stop(self, silence: float | None = None) -> bool:
        """End it, and wait until it has, while it goes on; False where nothing was heard of it for too long."""
        self.end()
        patience = SILENCE_SECONDS if silence is None else silence
        while not self.wait(min(patience, 1.0)) and self.state != "left behind":
            if self._pace.silent_for() >= patience:
                self.state = "left behind"
                _left_behind.append(self._thread.name)
                words = "gh200: %s was told to end, and nothing was heard of it for %s: it is left behind"
                logger.warning(words, self._thread.name, format_seconds(patience))
        return self.state != "left behind"

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended by itself; False where it had not by then."""
        if self.begun:
            self._thread.join(timeout)
        return not self._thread.is_alive()
