"""Files in the order in which they will be asked for: worked on ahead within a ceiling of bytes, and written behind."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger("simpletuner_gh200")

MOST_AHEAD = 1024
"""Results that wait to be asked for, however small: each is a mapping of its own."""


def grouped(files: Iterable[str], read: int, process: int) -> Iterator[tuple[str, bool]]:
    """The files of a bucket, and whether each will be alone when it is processed.

    As SimpleTuner does it: files are read ``read`` at a time, and what was read is processed once that is ``process``
    or more, all together; what remains of the bucket comes last.
    """
    together = max(1, -(-process // max(1, read))) * max(1, read)
    listed = list(files)
    for at, file in enumerate(listed):
        start = at - at % together
        yield file, min(together, len(listed) - start) == 1


def dealt(shares: Sequence[Sequence[str]], rank: int, missing: Iterable[str]) -> list[str]:
    """Which of the ``missing`` files ``rank`` makes, where rank N trains on ``shares[N]``.

    Its own, but for those that a rank before it has as well; and a part of those that nobody trains on.
    """
    taken = {file for share in shares[:rank] for file in share}
    own = [file for file in dict.fromkeys(shares[rank]) if file not in taken]
    taken.update(*shares[rank:])
    others = sorted(file for file in missing if file not in taken)
    return own + [file for file in others if zlib.crc32(os.fsencode(file)) % len(shares) == rank]


@dataclass(eq=False, slots=True)
class FileInFlight:
    """One file on its way. There is one for each file of a data set, so it has to be small."""

    file: str
    variant: Any
    state: Literal["waiting", "working", "done"] = "waiting"
    claimed: Literal["no", "asked for", "passed over"] = "no"
    """Once claimed it is no more among what was made ahead."""
    cost: int = 0
    held: int = 0
    outcome: Any = None


class WorkAhead:
    """Deals files to workers in order, and their results to one consumer.

    The sum of what is being worked on and of results that nobody has asked for stays below ``ceiling``; a file that is
    larger by itself is worked on alone. Prediction only: a file that comes unexpectedly is dealt at once, one that is
    passed over is dropped.
    """

    def __init__(self, order: Sequence[tuple[str, Any]], ceiling: int, weigh: Callable[[str], int]) -> None:
        self._order = [FileInFlight(file, variant) for file, variant in order]
        self._place: dict[str, int] = {}
        for at, piece in enumerate(self._order):
            self._place.setdefault(piece.file, at)
        self._next = 0
        """The first that was not dealt."""
        self._claimed = 0
        """The first that was neither asked for nor passed over."""
        self._urgent: deque[FileInFlight] = deque()
        self._ceiling = ceiling
        self._weigh = weigh
        self._working = self._waiting = self._ready = 0
        self._turn = threading.Condition()
        self._stopped = False
        self.most = 0
        """Bytes, of what was in flight at once."""
        self.waited = 0.0
        """Seconds that the consumer waited for a result."""

    # -- workers -------------------------------------------------------------------------------------------------

    def deal(self) -> FileInFlight | None:
        """The next file, when there is room for it; None when there are no more."""
        with self._turn:
            while not self._stopped:
                piece, room = self._candidate()
                if piece is not None and room:
                    piece.state = "working"
                    self._working += piece.cost
                    self.most = max(self.most, self._working + self._waiting)
                    return piece
                self._turn.wait()
        return None

    def _candidate(self) -> tuple[FileInFlight | None, bool]:
        if self._urgent:
            # Whoever asked is waiting, so what waits to be asked for must not stand in its way.
            piece = self._urgent[0]
            self._weighed(piece)
            room = not self._working or self._working + piece.cost <= self._ceiling
            return (self._urgent.popleft() if room else piece), room
        while self._next < self._claimed:
            self._next += 1
        if self._next == len(self._order):
            return None, False
        piece = self._order[self._next]
        self._weighed(piece)
        busy = self._working + self._waiting
        room = (not busy or busy + piece.cost <= self._ceiling) and self._ready < MOST_AHEAD
        self._next += room
        return piece, room

    def _weighed(self, piece: FileInFlight) -> None:
        """A worker's thread must not end over it: whoever asked would wait for ever."""
        if not piece.cost:
            try:
                piece.cost = self._weigh(piece.file)
            except Exception:  # what can't be weighed is worked on alone
                logger.debug("gh200: %s can't be weighed", piece.file, exc_info=True)
                piece.cost = max(self._ceiling, 1)

    def finished(self, piece: FileInFlight, outcome: Any, held: int) -> None:
        """``held``: bytes of the result."""
        with self._turn:
            self._working -= piece.cost
            piece.state = "done"
            if piece.claimed != "passed over":
                piece.outcome = outcome
            if piece.claimed == "no":
                piece.held = held
                self._waiting += held
                self._ready += 1
            self._turn.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def working(self) -> int:
        """Bytes of what is being worked on."""
        return self._working

    def stop(self) -> None:
        """Deal no more."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    # -- the consumer --------------------------------------------------------------------------------------------

    def claim(self, file: str) -> FileInFlight:
        """What comes of ``file``; those before it that nobody asked for are dropped. ``result`` waits for it."""
        with self._turn:
            at = self._place.get(file, -1)
            if at < self._claimed:
                return self._at_once(FileInFlight(file, None))
            for passed in self._order[self._claimed : at]:
                self._take(passed, "passed over")
                passed.outcome = None
            piece = self._order[at]
            self._claimed = at + 1
            if piece.state == "waiting":
                return self._at_once(piece)
            self._take(piece, "asked for")
            self._turn.notify_all()
            return piece

    def again(self, file: str, variant: Any) -> FileInFlight:
        with self._turn:
            return self._at_once(FileInFlight(file, variant))

    def result(self, piece: FileInFlight) -> Any:
        began = time.monotonic()
        with self._turn:
            self._turn.wait_for(lambda: piece.state == "done")
        self.waited += time.monotonic() - began
        return piece.outcome

    def _take(self, piece: FileInFlight, how: Literal["asked for", "passed over"]) -> None:
        piece.claimed = how
        if piece.state == "done":
            self._waiting -= piece.held
            self._ready -= 1
            piece.held = 0

    def _at_once(self, piece: FileInFlight) -> FileInFlight:
        piece.claimed = "asked for"
        self._urgent.append(piece)
        self._turn.notify_all()
        return piece


class WorkBehind:
    """Carries out what it is handed, in order, in one thread, while whoever handed it over goes on."""

    def __init__(self, most: int, failed: Callable[[Exception], None]) -> None:
        """``most``: pieces of work that wait; whoever hands over more waits as well."""
        self._most = most
        self._failed = failed
        self._pending: deque[tuple[frozenset[str], Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.waited = 0.0
        """Seconds that others waited."""
        self._thread = threading.Thread(target=self._run, name="gh200-behind", daemon=True)
        self._thread.start()

    def hand_over(self, names: Iterable[str], work: Callable[[], object]) -> None:
        with self._changed:
            self._wait(lambda: len(self._pending) < self._most)
            self._pending.append((frozenset(names), work))
            self._changed.notify_all()

    def wait_for(self, name: str) -> None:
        """Until no work on ``name`` is left. What the work itself asks is answered at once."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._wait(lambda: all(name not in names for names, _ in self._pending))

    def drain(self) -> None:
        with self._changed:
            self._wait(lambda: not self._pending)

    def close(self) -> None:
        """When all of it is done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _wait(self, until: Callable[[], bool]) -> None:
        began = time.monotonic()
        self._changed.wait_for(until)
        self.waited += time.monotonic() - began

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._ended)
                if not self._pending:
                    return
                _names, work = self._pending[0]
            try:
                work()
            except Exception as failure:  # noqa: BLE001 - whoever handed it over says what becomes of it
                self._failed(failure)
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()
