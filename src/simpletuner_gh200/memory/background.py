"""Work while training runs: few threads at low priority, resting so that training has the machine.

A job never ends a run, and stops within a file's time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.units import format_seconds

logger = logging.getLogger("simpletuner_gh200")

NICE = 15
"""Of a thread in the background: it runs where nobody else wants to."""

CORES_PER_THREAD = 8
MOST_THREADS = 8
FEW_CORES = 4
SHARE_ON_FEW_CORES = 0.25
"""Of its time that a background thread works, where training needs every core: the lock and the caches of the processor
are shared even with a thread that only runs in gaps."""


LEAST_WORKED = 0.001
"""Seconds after which a thread rests: waking up for less costs training more than the work itself."""


@dataclass(frozen=True)
class Effort:
    """What background work may take of a machine."""

    threads: int
    share: float
    """Of its time that each thread works; it rests in between."""


def background_effort(cores: int) -> Effort:
    threads = max(1, min(cores // CORES_PER_THREAD, MOST_THREADS))
    return Effort(threads, SHARE_ON_FEW_CORES if cores <= FEW_CORES else 1.0)


def waits_for_first_step(cores: int) -> bool:
    """Does background work begin after the first optimizer step? Where cores are few it would only delay that step."""
    return cores <= FEW_CORES


class Pace:
    """At full speed, and to the end."""

    ended = False

    def begin(self) -> None:
        """A thread starts to work, or goes on after it waited for work."""

    def rest(self, size: int) -> None:
        """A thread has done so many bytes."""


class BackgroundPace(Pace):
    """For all threads of one background job; ``end`` makes them stop at their next file."""

    def __init__(self, share: float = 1.0) -> None:
        self._stop = threading.Event()
        self._share = share
        self._local = threading.local()
        self._heard = time.monotonic()

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return self._stop.is_set()

    def begin(self) -> None:
        if not hasattr(self._local, "since"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux: of this thread alone
        self._local.since = self._heard = time.monotonic()

    def end(self) -> None:
        self._heard = time.monotonic()
        self._stop.set()

    def silent_for(self) -> float:
        """Seconds since any of its threads was heard of, or since they were told to end."""
        return time.monotonic() - self._heard

    def rest(self, size: int) -> None:
        """As long as the share asks for after the time that was worked."""
        self._heard = time.monotonic()
        worked = self._heard - self._local.since
        if worked < LEAST_WORKED:
            return
        if self._share < 1.0:
            self._stop.wait(min(worked * (1 / self._share - 1), 1.0))
        self._local.since = time.monotonic()


AT_ONCE = Pace()


# -- a job ---------------------------------------------------------------------------------------------------------

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
                words = "gh200: %s does not stop: no response for %s; it is abandoned"
                logger.warning(words, self._thread.name, format_seconds(patience))
        return self.state != "left behind"

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended by itself; False where it had not by then."""
        if self.begun:
            self._thread.join(timeout)
        return not self._thread.is_alive()
