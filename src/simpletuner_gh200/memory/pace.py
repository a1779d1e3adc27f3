"""How hard background work may go: few threads, at low priority, resting so that training has the machine."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

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
