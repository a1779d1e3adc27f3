"""The stager on host memory: right bytes, never a deadlock, survives failures, ends quickly."""

import gc
import os
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory.driver.interface import Copy
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.memory.staging.buffers import TorchBuffers
from simpletuner_gh200.memory.staging.layout import Range, copies_of, lay_out
from simpletuner_gh200.memory.staging.stager import DeviceStager

SHAPE = (2, 3)
SIZE = 24


class Gate(NullDriver):
    """A null driver whose copies wait for a gate, or fail on request."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.fail_sources: set[int] = set()

    def copy(self, copies: Sequence[Copy], stream: int, ordinal: int) -> None:
        self.entered.release()
        assert self.open.wait(10)
        if any(source in self.fail_sources for _, source, _ in copies):
            raise DriverError("copy", 1, "INVALID_VALUE")
        super().copy(copies, stream, ordinal)


@pytest.fixture
def slab() -> Slab:
    made = Slab.anonymous(64 * 1024)
    for index in range(100):
        made.tensor(index * SIZE, SHAPE, torch.float32).fill_(index)
    return made


@pytest.fixture
def driver() -> Gate:
    return Gate()


@pytest.fixture
def stager(driver: Gate) -> Iterator[DeviceStager]:
    made = DeviceStager(driver, TorchBuffers("cpu"), depth=2, capacity=3)
    yield made
    driver.open.set()
    made.close()
    assert not made._thread.is_alive()


def group(slab: Slab, *indexes: int) -> list[Range]:
    return [Range(slab, index * SIZE, SHAPE, torch.float32) for index in indexes]


def expect(tensor: torch.Tensor | None, *values: int) -> None:
    assert tensor is not None
    assert torch.equal(tensor, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1).expand(-1, *SHAPE))


def test_batches_arrive_stacked_and_in_any_order(stager: DeviceStager, slab: Slab) -> None:
    tickets = [stager.submit(step, [group(slab, step, step + 1), group(slab, 50 + step)]) for step in range(3)]
    for step in (2, 0, 1):
        latents, embeds = tickets[step].wait()
        expect(latents, step, step + 1)
        expect(embeds, 50 + step)
    assert stager.staged + stager.inline == 3


def test_a_full_queue_or_no_depth_left_never_blocks(stager: DeviceStager, slab: Slab, driver: Gate) -> None:
    driver.open.clear()
    tickets = [stager.submit(step, [group(slab, step)]) for step in range(12)]
    driver.entered.acquire()
    driver.open.set()
    for step in (11, 5, 3, 8):
        expect(tickets[step].wait()[0], step)
    for step in (0, 1, 2, 4, 6, 7, 9, 10):
        expect(tickets[step].wait()[0], step)
    assert stager.inline > 0


def test_a_failing_group_leaves_the_others_and_the_next_batch(stager: DeviceStager, slab: Slab, driver: Gate) -> None:
    driver.fail_sources.add(slab.address + 7 * SIZE)
    bad = stager.submit("bad", [group(slab, 1), group(slab, 7), group(slab, 2)])
    good = stager.submit("good", [group(slab, 3)])
    first, failed, last = bad.wait()
    expect(first, 1)
    expect(last, 2)
    assert failed is None
    assert isinstance(bad.errors[1], DriverError)
    expect(good.wait()[0], 3)
    assert stager.failed == 1


def test_cancelled_and_dropped_tickets_make_room(stager: DeviceStager, slab: Slab) -> None:
    for step in range(20):
        ticket = stager.submit(step, [group(slab, step)])
        if step % 2:
            ticket.cancel()
            with pytest.raises(MemoryRoomError, match="cancelled"):
                ticket.wait()
    del ticket
    gc.collect()
    expect(stager.submit("last", [group(slab, 9)]).wait()[0], 9)
    with stager._changed:
        stager._changed.wait_for(lambda: stager._schedule.ahead == 0, timeout=5)
        assert stager._schedule.ahead == 0


def test_sources_stay_alive_until_copied(stager: DeviceStager, driver: Gate) -> None:
    driver.open.clear()
    slab = Slab.anonymous(4096)
    slab.tensor(0, SHAPE, torch.float32).fill_(5)
    ticket = stager.submit(0, [group(slab, 0)])
    slab.close()
    del slab
    gc.collect()
    driver.open.set()
    expect(ticket.wait()[0], 5)


def test_after_close_tickets_can_still_be_waited_for(stager: DeviceStager, slab: Slab) -> None:
    tickets = [stager.submit(step, [group(slab, step)]) for step in range(3)]
    stager.close()
    stager.close()
    for step, ticket in enumerate(tickets):
        expect(ticket.wait()[0], step)
    expect(stager.submit("late", [group(slab, 4)]).wait()[0], 4)


def test_consumers_on_several_threads(stager: DeviceStager, slab: Slab) -> None:
    wrong: list[int] = []

    def consume(start: int) -> None:
        for step in range(start, start + 20):
            (tensor,) = stager.submit(step, [group(slab, step)]).wait()
            if tensor is None or float(tensor[0, 0, 0]) != step:
                wrong.append(step)

    threads = [threading.Thread(target=consume, args=(start,)) for start in (0, 20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_neighbours_are_copied_in_one_go(slab: Slab) -> None:
    copies = copies_of(group(slab, 3, 4, 5, 9), 1000)
    base = slab.address
    assert copies == [(1000, base + 3 * SIZE, 3 * SIZE), (1000 + 3 * SIZE, base + 9 * SIZE, SIZE)]


def test_layout_aligns_groups_and_refuses_a_mixed_one(slab: Slab) -> None:
    layout = lay_out([group(slab, 1, 2), group(slab, 3)])
    assert layout.offsets == (0, 256)
    assert layout.size == 256 + SIZE
    mixed = [*group(slab, 1), Range(slab, 0, (4,), torch.float32)]
    with pytest.raises(ValueError, match="alike"):
        lay_out([mixed])


def test_a_consumer_that_copies_itself_does_not_wait_for_the_copy(stager: DeviceStager, slab: Slab) -> None:
    released = threading.Event()
    driver = stager._driver
    assert isinstance(driver, Gate)
    driver.synchronize_event = lambda event, ordinal: released.wait(10)  # type: ignore[assignment, method-assign]
    stager._schedule.depth = 1
    first = stager.submit("keeps the worker busy", [group(slab, 1)])
    second = stager.submit("taken at once", [group(slab, 2)])
    expect(second.wait()[0], 2)
    expect(first.wait()[0], 1)
    assert second._sources or first._sources, "a copy under way keeps its source"
    released.set()
    stager.close()
    assert second._sources == first._sources == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused_instead_of_waiting_for_a_thread_it_has_not(stager: DeviceStager, slab: Slab) -> None:
    ticket = stager.submit(0, [group(slab, 0)])
    pid = os.fork()
    if pid == 0:
        try:
            ticket.wait()
        except MemoryRoomError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expect(ticket.wait()[0], 0)
