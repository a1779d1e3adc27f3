"""Copies on host memory, as if a side stream lagged and failed: right bytes, sources held exactly as long as needed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from simpletuner_gh200.memory.lane import Copier, Lane, Move, StillUnderWay, lanes, spot_of
from simpletuner_gh200.memory.slab import Bytes, Slab

SIZE = 24


class Lagging(Lane):
    """Its work is done when the test says so, and its calls fail on request."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.over = True
        self.failing: dict[str, Exception] = {}
        self.order: list[str] = []

    def _step(self, name: str) -> None:
        self.order.append(name)
        if name in self.failing:
            raise self.failing[name]

    def memory(self, size: int) -> torch.Tensor:
        self._step("memory")
        return super().memory(size)

    def copy(self, moves: Iterable[Move], *after: Any) -> str:
        self._step("copy")
        super().copy(moves, *after)
        return "ticket"

    def wait(self, ticket: Any, brought: torch.Tensor | None = None) -> None:
        self._step("wait")

    def hand_over(self, memory: torch.Tensor) -> None:
        self._step("hand_over")

    def done(self, ticket: Any) -> bool:
        self._step("done")
        return self.over

    def settle(self) -> None:
        self._step("settle")
        self.over = True


@pytest.fixture
def slab() -> Slab:
    made = Slab.anonymous(64 * 1024)
    made.array[: 100 * SIZE].reshape(100, SIZE)[:] = [[index] for index in range(100)]
    return made


@pytest.fixture
def lane() -> Lagging:
    return Lagging()


@pytest.fixture
def copier(lane: Lagging) -> Iterator[Copier]:
    made = Copier(lane)
    yield made
    lane.failing.clear()
    made.close()


def rows(slab: Slab, *indexes: int) -> list[Bytes]:
    return [slab.bytes_at(index * SIZE, SIZE) for index in indexes]


def expect(buffer: torch.Tensor | None, *values: int) -> None:
    assert buffer is not None
    assert torch.equal(buffer.view(-1, SIZE), torch.tensor(values, dtype=torch.uint8).view(-1, 1).expand(-1, SIZE))


def test_bytes_go_from_spot_to_spot() -> None:
    out, back = lanes(torch.device("cpu"))
    source, there = torch.arange(10, dtype=torch.int32), torch.zeros(100, dtype=torch.uint8)
    ticket = out.copy([((there.untyped_storage(), 8), spot_of(source[2:5]), 12)], out.here())
    out.wait(ticket)
    assert out.done(ticket)
    assert there[8:20].view(torch.int32).tolist() == [2, 3, 4]
    large = torch.arange(100_000)
    copy = torch.empty_like(large)
    back.copy([(spot_of(copy), spot_of(large), large.nbytes)])
    assert copy.equal(large)
    assert back.seconds(back.mark(), back.mark()) >= 0


def test_pieces_arrive_stacked_each_step_in_its_order(copier: Copier, slab: Slab, lane: Lagging) -> None:
    expect(copier.copy(rows(slab, 7, 3, 4)), 7, 3, 4)
    assert lane.order == ["memory", "copy", "wait", "hand_over"]
    read_only = slab.bytes_at(99 * SIZE, SIZE)
    read_only.flags.writeable = False
    expect(copier.copy([read_only]), 99)
    assert copier.copy([]) is not None
    assert (copier.copied, copier.failed) == (3, 0)


def test_sources_are_held_until_they_are_copied_and_nobody_waits(
    copier: Copier, slab: Slab, lane: Lagging, caplog: pytest.LogCaptureFixture
) -> None:
    lane.over = False
    short = Slab.anonymous(4096)
    short.array[:SIZE] = 5
    gone = weakref.ref(short.region)
    expect(copier.copy(rows(short, 0)), 5)
    short.close()
    del short
    copier.copy(rows(slab, 1))
    copier.let_go()
    gc.collect()
    assert gone() is not None, "its copy may still be under way"
    lane.failing = {"done": RuntimeError("no answer")}
    copier.let_go()
    assert "could not be observed" in caplog.text
    assert copier.under_way == 2
    lane.failing, lane.over = {}, True
    copier.let_go()
    gc.collect()
    assert gone() is None
    assert copier.under_way == 0
    assert "settle" not in lane.order


def test_close_waits_once_and_lets_everything_go(copier: Copier, slab: Slab, lane: Lagging) -> None:
    lane.over = False
    buffers = [copier.copy(rows(slab, index)) for index in range(3)]
    assert copier.under_way == 3
    copier.close()
    copier.close()
    assert lane.order.count("settle") == 1
    assert copier.under_way == 0
    for index, buffer in enumerate(buffers):
        expect(buffer, index)
    assert copier.copy(rows(slab, 1)) is None, "the caller has its other way"


@pytest.mark.parametrize("closing", [True, False])
def test_where_the_end_can_not_be_seen_nothing_is_let_go(
    copier: Copier, slab: Slab, lane: Lagging, caplog: pytest.LogCaptureFixture, closing: bool
) -> None:
    lane.over = False
    if closing:
        copier.copy(rows(slab, 1))
        lane.failing = {"settle": RuntimeError("no answer")}
        copier.close()
        assert "could not be observed" in caplog.text
    else:
        lane.failing = {"copy": StillUnderWay("no end")}
        assert copier.copy(rows(slab, 1)) is None
        lane.failing, lane.over = {}, True
        copier.close()
    assert copier.under_way == 1


@pytest.mark.parametrize("call", ["memory", "copy", "wait", "hand_over", "done"])
def test_a_failing_call_is_one_batchs_trouble(
    copier: Copier, slab: Slab, lane: Lagging, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    expect(copier.copy(rows(slab, 1)), 1)
    lane.failing = {call: torch.OutOfMemoryError(f"{call} is out of order")}
    assert copier.copy(rows(slab, 2)) is None
    assert copier.copy(rows(slab, 2)) is None
    assert copier.failed == 2
    assert caplog.text.count(call) == 1, "said once, counted always"
    lane.failing.clear()
    expect(copier.copy(rows(slab, 3)), 3)
    copier.close()
    assert "2 of 4 batches could not be copied" in caplog.text


def test_consumers_on_several_threads(copier: Copier, slab: Slab) -> None:
    wrong: list[int] = []

    def consume(start: int) -> None:
        for step in range(start, start + 20):
            buffer = copier.copy(rows(slab, step))
            if buffer is None or int(buffer[0]) != step:
                wrong.append(step)

    threads = [threading.Thread(target=consume, args=(start,)) for start in (0, 20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert copier.copied == 80
