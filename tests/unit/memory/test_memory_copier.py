"""The copier on host memory: right bytes, sources kept exactly as long as needed, failures that are told."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from simpletuner_gh200.errors import DriverError, MemoryRoomError
from simpletuner_gh200.memory.copier import Copier, SlabRange, TorchMemory, copies_of
from simpletuner_gh200.memory.driver.interface import Copy
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.slab import Slab

SIZE = 24


class Device(NullDriver):
    """A null driver whose work is done when the test says so, and whose calls fail on request."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.done = True
        self.failing: set[str] = set()
        self.order: list[str] = []

    def _step(self, name: str) -> None:
        self.order.append(name)
        if name in self.failing:
            raise DriverError(name, 1, "INVALID_VALUE")

    def create_event(self, ordinal: int) -> int:
        self._step("create_event")
        return super().create_event(ordinal)

    def copy(self, copies: Sequence[Copy], stream: int, ordinal: int) -> None:
        self._step("copy")
        super().copy(copies, stream, ordinal)

    def record_event(self, event: int, stream: int, ordinal: int) -> None:
        self._step("record_event")

    def wait_event(self, stream: int, event: int, ordinal: int) -> None:
        self._step("wait_event")

    def event_done(self, event: int, ordinal: int) -> bool:
        self._step("event_done")
        return self.done

    def synchronize_stream(self, stream: int, ordinal: int) -> None:
        self._step("synchronize_stream")
        self.done = True

    def destroy_event(self, event: int, ordinal: int) -> None:
        super().destroy_event(event, ordinal)
        self._step("destroy_event")

    @property
    def open_events(self) -> int:
        return self.counts["create_event"] - self.counts["destroy_event"]


@pytest.fixture
def slab() -> Slab:
    made = Slab.anonymous(64 * 1024)
    made.array[: 100 * SIZE].reshape(100, SIZE)[:] = [[index] for index in range(100)]
    return made


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def copier(device: Device) -> Iterator[Copier[torch.Tensor]]:
    made = Copier(device, TorchMemory("cpu"))
    yield made
    device.failing.clear()
    made.close()
    assert made.under_way == 0
    assert device.open_events == 0


def rows(slab: Slab, *indexes: int) -> list[SlabRange]:
    return [SlabRange(slab, index * SIZE, SIZE) for index in indexes]


def expect(buffer: torch.Tensor | None, *values: int) -> None:
    assert buffer is not None
    assert torch.equal(buffer.view(-1, SIZE), torch.tensor(values, dtype=torch.uint8).view(-1, 1).expand(-1, SIZE))


def test_ranges_arrive_stacked(copier: Copier[torch.Tensor], slab: Slab) -> None:
    first, second = copier.copy(rows(slab, 7, 3, 4)), copier.copy(rows(slab, 99))
    expect(first, 7, 3, 4)
    expect(second, 99)
    assert (copier.copied, copier.failed) == (2, 0)


def test_every_step_in_its_order(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchMemory, "hand_over", lambda _memory, _buffer: device.order.append("hand_over"))
    copier.copy(rows(slab, 1))
    assert device.order == ["create_event", "copy", "record_event", "wait_event", "hand_over"]


def test_sources_are_held_until_the_event_is_done_and_nobody_waits(
    copier: Copier[torch.Tensor], slab: Slab, device: Device
) -> None:
    device.done = False
    short = Slab.anonymous(4096)
    short.array[:SIZE] = 5
    gone = weakref.ref(short.region)
    expect(copier.copy(rows(short, 0)), 5)
    short.close()
    del short
    copier.copy(rows(slab, 1))
    gc.collect()
    assert gone() is not None, "its copy may still be under way"
    assert copier.under_way == 2
    device.done = True
    copier.copy(rows(slab, 2))
    gc.collect()
    assert gone() is None
    assert copier.under_way == 1, "the latest is not known to be done before the next call"
    assert "synchronize_stream" not in device.order


def test_what_was_read_can_be_let_go_without_another_copy(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.done = False
    copier.copy(rows(slab, 1))
    copier.let_go()
    assert copier.under_way == 1, "its copy may still be under way"
    device.failing = {"event_done"}
    copier.let_go()
    assert "could not be observed" in caplog.text
    device.failing, device.done = set(), True
    copier.let_go()
    assert copier.under_way == 0
    assert "synchronize_stream" not in device.order


def test_an_event_that_is_not_taken_back_holds_nothing_up(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    copier.copy(rows(slab, 1))
    device.failing = {"destroy_event"}
    expect(copier.copy(rows(slab, 2)), 2)
    copier.close()
    assert copier.under_way == 0
    assert caplog.text.count("destroy_event failed") == 2


def test_close_waits_once_and_lets_everything_go(copier: Copier[torch.Tensor], slab: Slab, device: Device) -> None:
    device.done = False
    buffers = [copier.copy(rows(slab, index)) for index in range(3)]
    assert copier.under_way == 3
    copier.close()
    copier.close()
    assert device.order.count("synchronize_stream") == 1
    assert copier.under_way == device.open_events == 0
    for index, buffer in enumerate(buffers):
        expect(buffer, index)
    assert copier.copy(rows(slab, 1)) is None, "the caller has its other way"


def test_where_the_end_cannot_be_observed_nothing_is_let_go(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.done = False
    copier.copy(rows(slab, 1))
    device.failing = {"synchronize_stream"}
    copier.close()
    assert copier.under_way == 1
    assert "could not be observed" in caplog.text


@pytest.mark.parametrize("call", ["create_event", "copy", "record_event", "wait_event", "event_done"])
def test_a_failing_call_is_one_batchs_trouble(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    expect(copier.copy(rows(slab, 1)), 1)
    device.failing = {call}
    assert copier.copy(rows(slab, 2)) is None
    assert copier.copy(rows(slab, 2)) is None
    assert copier.failed == 2
    assert caplog.text.count(call) == 1, "said once, counted always"
    device.failing.clear()
    expect(copier.copy(rows(slab, 3)), 3)
    copier.close()
    assert "2 of 4 batches could not be copied" in caplog.text


@pytest.mark.parametrize("call", ["copy", "record_event", "wait_event"])
def test_a_failed_batch_still_holds_its_sources_until_the_event(
    copier: Copier[torch.Tensor], slab: Slab, device: Device, call: str
) -> None:
    device.failing, device.done = {call}, False
    short = Slab.anonymous(4096)
    gone = weakref.ref(short.region)
    assert copier.copy(rows(short, 0)) is None
    short.close()
    del short
    device.failing.clear()
    recorded = device.order.count("record_event")
    copier.copy(rows(slab, 1))
    gc.collect()
    assert gone() is not None, "some of its copies may have been queued"
    again = device.order.count("record_event") - recorded
    assert again == (2 if call == "record_event" else 1), "an event that was never recorded tells nothing"
    device.done = True
    copier.copy(rows(slab, 1))
    gc.collect()
    assert gone() is None


def test_out_of_memory_makes_the_caller_fall_back(device: Device, slab: Slab) -> None:
    class Full(TorchMemory):
        def take(self, size: int) -> torch.Tensor:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    copier = Copier(device, Full("cpu"))
    assert copier.copy(rows(slab, 1)) is None
    assert copier.failed == 1
    assert device.open_events == copier.under_way == 0


def test_consumers_on_several_threads(copier: Copier[torch.Tensor], slab: Slab) -> None:
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


def test_neighbours_of_one_slab_are_copied_in_one_go(slab: Slab) -> None:
    base = slab.address
    assert copies_of(rows(slab, 3, 4, 5, 9), 1000) == [
        (1000, base + 3 * SIZE, 3 * SIZE),
        (1000 + 3 * SIZE, base + 9 * SIZE, SIZE),
    ]


def test_nothing_is_copied_for_nothing(copier: Copier[torch.Tensor], slab: Slab) -> None:
    assert copies_of([SlabRange(slab, 8, 0)], 1000) == []
    assert copier.copy([]) is not None


def test_a_range_outside_its_slab_is_the_callers_mistake(copier: Copier[torch.Tensor], slab: Slab) -> None:
    with pytest.raises(ValueError, match="outside slab"):
        copier.copy([SlabRange(slab, slab.size, 1)])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused(copier: Copier[torch.Tensor], slab: Slab, device: Device) -> None:
    copier.copy(rows(slab, 0))
    pid = os.fork()
    if pid == 0:
        try:
            copier.copy(rows(slab, 0))
        except MemoryRoomError:
            copier.close()  # leaves the parent's work alone
            os._exit(0 if "synchronize_stream" not in device.order else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expect(copier.copy(rows(slab, 4)), 4)
