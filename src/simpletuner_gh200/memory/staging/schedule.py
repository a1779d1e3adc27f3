"""Which batch is copied next, and who may take it: the state machine of device staging. No threads, no clock, no I/O.

A batch is queued, copied by the worker, then ready until its consumer takes it. At most ``depth`` batches are copying
or ready at a time, at most ``capacity`` are queued. A consumer never waits for work that nobody has begun: it claims
it and does it itself, so a full queue or a small depth can slow it down but not stop it.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal


class State(Enum):
    QUEUED = "queued"
    DECLINED = "declined"
    """The queue was full: the consumer will do it when it gets there."""
    COPYING = "copying"
    READY = "ready"
    CLAIMED = "claimed"
    """The consumer does the work itself."""


Claim = Literal["ready", "wait", "yours", "gone"]
"""What a consumer is told: take it; the worker is at it; do it yourself; it was cancelled or taken."""


class Schedule:
    """The caller serializes access. Keys grow; a batch that is taken or cancelled is forgotten."""

    def __init__(self, depth: int, capacity: int) -> None:
        if depth < 1 or capacity < 1:
            raise ValueError(f"depth and capacity start at 1, found {depth} and {capacity}")
        self.depth = depth
        self.capacity = capacity
        self.closed = False
        self._states: dict[int, State] = {}

    def state(self, key: int) -> State | None:
        return self._states.get(key)

    def count(self, *states: State) -> int:
        return sum(state in states for state in self._states.values())

    @property
    def ahead(self) -> int:
        """Batches that occupy device memory on behalf of the worker."""
        return self.count(State.COPYING, State.READY)

    def submit(self, key: int) -> State:
        if key in self._states:
            raise ValueError(f"batch {key} is already under way")
        full = self.closed or self.count(State.QUEUED) >= self.capacity
        self._states[key] = State.DECLINED if full else State.QUEUED
        return self._states[key]

    def start(self) -> int | None:
        """The oldest queued batch, now copying; None when there is none or ``depth`` are ahead already."""
        if self.closed or self.ahead >= self.depth:
            return None
        for key, state in self._states.items():
            if state is State.QUEUED:
                self._states[key] = State.COPYING
                return key
        return None

    def finish(self, key: int) -> bool:
        """The worker has queued what ``key`` needs. False: nobody wants it any more, drop what was made."""
        if self._states.get(key) is not State.COPYING:
            return False
        self._states[key] = State.READY
        return True

    def claim(self, key: int) -> Claim:
        """The consumer is here for ``key``."""
        state = self._states.get(key)
        if state in {State.QUEUED, State.DECLINED}:
            self._states[key] = State.CLAIMED
            return "yours"
        if state is State.READY:
            return "ready"
        return "wait" if state is State.COPYING else "gone"

    def take(self, key: int) -> None:
        """The consumer has it; its place is free for the next."""
        self._states.pop(key, None)

    def cancel(self, key: int) -> None:
        """Not wanted any more. A copy under way runs to its end and is then dropped."""
        self._states.pop(key, None)

    def close(self) -> None:
        """Start nothing any more. What is ready can still be taken; what is queued its consumer does itself."""
        self.closed = True
