"""What becomes of a picture whose worker does not come back: never a hang, and out of the data set only for cause."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.caching.pipeline import WorkAhead
from simpletuner_gh200.caching.workers import WorkerPool
from simpletuner_gh200.seams.features.caching.hands import Hands
from simpletuner_gh200.seams.features.caching.preparing import Preparation

TARGET = "tests.unit.caching.work_samples:workshop"


def outcomes(
    words: list[str], pool: Any, *, weigh: Any = len, seconds: float = 60.0, folder: str = ""
) -> tuple[list[Any], list[str]]:
    """What comes of jobs named so, in order, and what was said."""
    files = [f"{folder}{number} {word}" for number, word in enumerate(words)]
    said: list[str] = []
    ahead = WorkAhead([(file, None) for file in files], 1 << 20, weigh)
    hands = Hands(pool, ahead, lambda piece: ((piece.file.split()[1], 10), b""), seconds, said.append)
    assert hands.start()
    results: list[Any] = []
    consumer = threading.Thread(target=lambda: results.extend(ahead.result(ahead.claim(file)) for file in files))
    consumer.daemon = True
    consumer.start()
    consumer.join(60)
    ahead.stop()
    assert not consumer.is_alive(), "somebody waits for ever"
    return [verdict.kind if isinstance(verdict, Preparation) else "done" for verdict, _array in results], said


@pytest.fixture
def pool():
    made = WorkerPool(TARGET, 2)
    yield made
    made.close()


def test_a_picture_that_costs_two_workers_is_lost_where_others_are_done(pool: WorkerPool) -> None:
    assert outcomes(["echo", "echo", "die", "echo", "numbers"], pool)[0] == ["done", "done", "lost", "done", "done"]


def test_no_picture_is_lost_where_no_worker_can_work(pool: WorkerPool) -> None:
    """Or the whole data set would be left out of the run."""
    assert outcomes(["die"] * 4, pool)[0] == ["rank"] * 4


def test_no_picture_is_lost_where_everything_stands_still(pool: WorkerPool) -> None:
    assert outcomes(["hang", "hang"], pool, seconds=0.3)[0] == ["rank", "rank"]


@pytest.mark.parametrize(
    ("word", "there", "kind"), [("hang", True, "rank"), ("hang", False, "lost"), ("burn", True, "lost")]
)
def test_a_file_that_storage_does_not_answer_for_is_the_ranks_and_one_without_end_is_lost(
    pool: WorkerPool, tmp_path: Path, word: str, there: bool, kind: str
) -> None:
    """Others are done meanwhile. A pipe waits for ever; a decoder that has lost its way takes a core."""
    if there:
        (tmp_path / f"1 {word}").touch()
    found, _said = outcomes(["echo", word, *["echo"] * 3], pool, seconds=2.0, folder=f"{tmp_path}/")
    assert found == ["done", kind, "done", "done", "done"]


def test_what_a_worker_can_only_raise_at_is_the_ranks(pool: WorkerPool) -> None:
    kinds, said = outcomes(["raise", "echo"], pool)
    assert kinds == ["rank", "done"]
    assert "OSError" in said[0]


def test_a_picture_without_weight_is_worked_on(pool: WorkerPool) -> None:
    def weigh(file: str) -> int:
        raise TypeError(f"no size: {file}")

    assert outcomes(["echo", "echo", "echo"], pool, weigh=weigh)[0] == ["done"] * 3


def test_without_workers_simpletuner_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool("tests.unit.caching.not_there:workshop", 3)
    assert outcomes(["echo"] * 5, pool)[0] == ["rank"] * 5
    pool.close()


def test_nobody_starts_workers_for_a_pass_that_is_over(pool: WorkerPool) -> None:
    ahead = WorkAhead([("one", None)], 100, len)
    hands = Hands(pool, ahead, lambda piece: (("hang", None), b""), 60.0, print)
    assert hands.start()
    pieces = threading.Event()
    while not (pool._server and ahead.working):
        pieces.wait(0.02)
    pieces.wait(1.0)
    ahead.stop()
    pool.close()
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("gh200-caching-")]
    for thread in waiting:
        thread.join(30)
    assert pool._server is None
