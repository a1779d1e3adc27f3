"""Datasets that come into memory while training runs, and how all ranks end together where one can't."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from simpletuner_gh200.errors import GH200Error, StoreError
from simpletuner_gh200.memory.background import BackgroundJob
from simpletuner_gh200.memory.mapping import SIZE_SEALS, create_memfd, map_shared
from simpletuner_gh200.memory.pace import Effort, EndablePace, Pace
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.store.coming import ComingDataset
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.staging import StagingStopped

logger = logging.getLogger("simpletuner_gh200")

Obtain = Callable[[Pace, Effort], StagedDataset]
"""Stages a dataset, or receives it from the rank that does."""


def _shared_word(group: NodeGroup, name: str) -> memoryview:
    """A number in memory that the ranks of a node share; 0 at first."""
    if group.is_leader:
        fd = create_memfd(name, 8, SIZE_SEALS)
        group.share(name, fd)
    else:
        _, (fd,) = group.receive(name)
    mapped = map_shared(fd)
    assert mapped is not None
    os.close(fd)
    return memoryview(mapped).cast("Q")


class StopAt:
    """The optimizer step at which all ranks of a node end, in memory that they share; 0 while nobody wants to."""

    def __init__(self, group: NodeGroup) -> None:
        self._leads = group.is_leader
        self._word = _shared_word(group, "stop")

    def reached(self, step: int, wanted: bool) -> bool:
        """Is ``step`` where this rank has to end? Asked before each batch; ``wanted`` counts in the leader only.

        The leader names the step after its own. No rank gets past a step that the leader has not finished, since
        gradients are shared there: so whoever comes to the named one knows of it.
        """
        if wanted and self._leads and not self._word[0]:
            self._word[0] = step + 1
        return bool(self._word[0]) and step >= self._word[0]


class Promised:
    """Bytes that datasets on their way will still take. The leader, who stages them, tells the other ranks."""

    def __init__(self, group: NodeGroup) -> None:
        self._word = _shared_word(group, "promised")
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return int(self._word[0])

    def set(self, name: str, size: int) -> None:
        """Leader: what is still to come of one dataset."""
        with self._lock:
            self._left[name] = max(size, 0)
            self._word[0] = sum(self._left.values())


class CountingPace(Pace):
    """Another pace, and what was done under it."""

    def __init__(self, pace: Pace, done: Callable[[int], None]) -> None:
        """``done`` is told the bytes so far, by any thread."""
        self._pace, self._done, self._total = pace, done, 0
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return self._pace.ended

    def begin(self) -> None:
        self._pace.begin()

    def rest(self, size: int) -> None:
        with self._lock:
            self._total += size
            self._done(self._total)
        self._pace.rest(size)


class Ahead:
    """A dataset that a thread obtains while SimpleTuner goes on; ``coming`` has it, or what went wrong."""

    def __init__(self, obtain: Callable[[Pace], StagedDataset]) -> None:
        self.coming: Future[StagedDataset] = Future()
        self._obtain = obtain
        self._pace = EndablePace()
        threading.Thread(target=self._run, name="gh200-captions", daemon=True).start()

    def _run(self) -> None:
        try:
            self.coming.set_result(self._obtain(self._pace))
        except BaseException as failed:  # noqa: BLE001 - whoever asks for the result raises it
            self.coming.set_exception(failed)

    def wait(self) -> None:
        """Until it is there; raises what prevented it."""
        self.coming.result()

    def stop(self) -> None:
        """Nobody wants it any more."""
        self._pace.end()
        if wait((self.coming,), timeout=10).not_done:
            logger.warning("gh200: gh200-captions was told to end and has not: it is left behind")


@dataclass
class _Coming:
    name: str
    dataset: ComingDataset
    obtain: Obtain


class Arrivals:
    """All datasets of a run that are on their way. Collective: every rank of a node has the same, in the same order."""

    def __init__(self, group: NodeGroup, arrived: Callable[[StagedDataset], None]) -> None:
        self.group = group
        self._arrived = arrived
        self._coming: list[_Coming] = []
        self._brought = 0
        """How many of them are there: the same order in every rank, whenever each of them begins."""
        self._job: BackgroundJob | None = None
        self._at_work = False
        self._failure: GH200Error | None = None
        self._stop_at = StopAt(group)
        self.promised = Promised(group)
        self._beginning = threading.Lock()
        self._owner = os.getpid()

    def expect(self, name: str, dataset: ComingDataset, obtain: Obtain) -> None:
        self._coming.append(_Coming(name, dataset, obtain))

    def begin(self) -> None:
        """Bring them, in the background: SimpleTuner reads images, or is done with preparing the data.

        Not before: where its caches are filled it reads captions only, and what it does then takes long enough.
        Only in the process of the rank: workers that SimpleTuner forks read images too.
        """
        if os.getpid() != self._owner:
            return
        with self._beginning:
            if self._at_work or self._brought == len(self._coming):
                return
            self._at_work = True
            self._job = BackgroundJob(self._bring_all, name="gh200-arrivals")
            self._job.start()

    def wait(self, timeout: float | None = None) -> bool:
        """For tests: until all are there, or one failed."""
        return self._job is None or self._job.wait(timeout)

    def end_if_failed(self, step: int) -> None:
        """Raises, in every rank at the same step, what ended the staging."""
        if not self._stop_at.reached(step, self._failure is not None):
            return
        self.wait(5)
        raise self._failure or StoreError("a dataset could not be held in memory; local rank 0 says why")

    def close(self) -> None:
        """Whatever is still coming does not come any more."""
        with self._beginning:
            self._at_work = True  # so that nobody begins again
        if self._job is not None:
            self._job.end()
        self.group.hang_up()
        if self._job is not None:
            self._job.stop(silence=10)

    def _bring_all(self, pace: Pace, effort: Effort) -> None:
        for one in self._as_they_come():
            try:
                self._bring(one, pace, effort)
            except StagingStopped:
                return
            except GH200Error as failure:
                if pace.ended:  # the others have hung up, as we have
                    return
                self._failure = failure
                logger.error("gh200: dataset %s: %s; the run ends with the next step", one.name, failure.message)
                return
            except (OSError, ValueError):  # of a connection that was closed while we waited at it
                if pace.ended:
                    return
                raise

    def _as_they_come(self) -> Iterator[_Coming]:
        """Datasets may still be added while the first ones are on their way; what comes later begins a new job."""
        while True:
            with self._beginning:
                if self._brought == len(self._coming):
                    self._at_work = False
                    return
                one = self._coming[self._brought]
            yield one
            self._brought += 1

    def _bring(self, one: _Coming, pace: Pace, effort: Effort) -> None:
        whole = one.obtain(pace, effort)
        one.dataset.prepare(whole)
        self.group.meet(f"{one.name} is there")
        one.dataset.arrive()
        self._arrived(whole)
