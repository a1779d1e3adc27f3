"""Threads of the rank, one for each worker: what is dealt to them is taken to a worker, and its answer back.

Whatever happens, each piece gets an outcome: SimpleTuner waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from simpletuner_gh200.caching.pipeline import FileInFlight, WorkAhead
from simpletuner_gh200.caching.workers import Worker, WorkerLost, WorkerPool, WorkerWaited
from simpletuner_gh200.seams.features.caching.jobs import WORKING_BYTES
from simpletuner_gh200.seams.features.caching.preparing import Preparation

MEGAPIXEL = WORKING_BYTES * 1_000_000

MOST_LOSSES = 2
"""Workers that a picture may cost."""

END_SECONDS = 1.0
"""For workers to finish what nobody asked for; those that hang are ended with their pool."""


class Hands:
    """What the threads of a pass share."""

    def __init__(
        self,
        pool: WorkerPool,
        ahead: WorkAhead,
        job: Callable[[FileInFlight], tuple[Any, Any]],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """``job``: of a piece, and the content that goes with it. ``seconds``: for a picture of no size."""
        self.pool = pool
        self.ahead = ahead
        self.job = job
        self.seconds = seconds
        self.say = say
        self.answered = 0
        """Jobs of this pass that workers did."""
        self._at_work = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> bool:
        """As many as the system gives; False where that is none."""
        with suppress(RuntimeError):  # "can't start new thread"
            for number in range(self.pool.count):
                thread = threading.Thread(target=_Hand(self).run, name=f"gh200-caching-{number}", daemon=True)
                with self._lock:
                    thread.start()
                    self._at_work += 1
                self._threads.append(thread)
        return bool(self._threads)

    def finish(self) -> None:
        """When nothing is dealt any more: their workers are given back."""
        end = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def has_answered(self) -> None:
        with self._lock:
            self.answered += 1

    def may_go(self) -> bool:
        """One that gets no worker leaves the pictures to the others; the last stays, and SimpleTuner does them."""
        with self._lock:
            others = self._at_work > 1
            self._at_work -= others
            return others


class _Hand:
    """One thread and its worker."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._worker: Worker | None = None

    def run(self) -> None:
        hands, goes = self._hands, False
        while not goes and (piece := hands.ahead.deal()) is not None:
            verdict, array = Preparation("rank"), None
            try:
                job, content = hands.job(piece)
                if not self._has_worker():
                    goes = hands.may_go()
                else:
                    verdict, array = self._asked(piece, job, content)
            except Exception as failure:  # noqa: BLE001 - whatever it is, SimpleTuner can still do it by itself
                hands.say(f"what workers can't do, SimpleTuner does by itself: {failure}")
            finally:
                hands.ahead.finished(piece, (verdict, array), 0 if array is None else array.nbytes)
        if self._worker is not None:
            hands.pool.give_back(self._worker)

    def _has_worker(self) -> bool:
        try:
            self._worker = self._worker or self._hands.pool.worker()
        except WorkerLost as refused:
            self._hands.say(f"fewer workers than cores: {refused}")
        return self._worker is not None

    def _asked(self, piece: FileInFlight, job: Any, content: Any) -> tuple[Preparation, Any]:
        hands, losses, before = self._hands, 0, self._hands.answered
        words, stalled = "", False
        # Once the pass is over, nobody wants it: no server is started for it.
        while losses < MOST_LOSSES and not hands.ahead.stopped and self._has_worker():
            worker, self._worker = self._worker, None
            assert worker is not None
            try:
                answer = worker.ask(job, content, hands.seconds + piece.cost / MEGAPIXEL)
            except WorkerLost as lost:
                # With its server all workers go, whatever they are at; and servers are not started without end.
                losses, words = losses + worker.has_server(), lost.message
                stalled = isinstance(lost, WorkerWaited) and os.path.isfile(piece.file)
                continue
            except Exception:
                self._worker = worker
                raise
            self._worker = worker
            hands.has_answered()
            return answer.message, answer.array
        # Part of a storage may stand still while the rest answers: the rank waits for it, as SimpleTuner would.
        if losses == MOST_LOSSES and not stalled and self._is_to_blame(piece, before):
            return Preparation("lost", words=words), None
        return Preparation("rank"), None

    def _is_to_blame(self, piece: FileInFlight, before: int) -> bool:
        """Did others do their pictures meanwhile? Else the disk stands still, memory is short, or no worker can work
        here: no reason to leave a picture out of a data set."""
        hands = self._hands
        alone = hands.ahead.working <= piece.cost
        return hands.answered > (0 if alone else before)
