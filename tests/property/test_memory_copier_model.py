"""The copier against a device that lags and fails at will: right bytes or None, sources held while they are read."""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.copier import Copier, SlabRange, TorchMemory, copies_of
from simpletuner_gh200.memory.driver.interface import Copy
from simpletuner_gh200.memory.driver.null import NullDriver
from simpletuner_gh200.memory.mapping import Region
from simpletuner_gh200.memory.slab import Slab

PIECES = st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4)
FALLIBLE = ("create_event", "copy", "record_event", "wait_event", "event_done")


class Lagging(NullDriver):
    """Copies wait in a queue until the device catches up. ``fail`` is the next call that fails."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.queue: deque[Copy | int] = deque()
        self.recorded: set[int] = set()
        self.awaited: set[int] = set()
        self.fail = ""

    def _maybe(self, name: str) -> None:
        if self.fail == name:
            self.fail = ""
            raise DriverError(name, 1, "INVALID_VALUE")

    def create_event(self, ordinal: int) -> int:
        self._maybe("create_event")
        return super().create_event(ordinal)

    def copy(self, copies: Sequence[Copy], stream: int, ordinal: int) -> None:
        for index, one in enumerate(copies):
            if index == len(copies) - 1:
                self._maybe("copy")  # those before it are queued already
            self.queue.append(one)

    def record_event(self, event: int, stream: int, ordinal: int) -> None:
        self._maybe("record_event")
        self.recorded.add(event)
        self.queue.append(event)

    def wait_event(self, stream: int, event: int, ordinal: int) -> None:
        self._maybe("wait_event")
        self.awaited.add(event)

    def event_done(self, event: int, ordinal: int) -> bool:
        self._maybe("event_done")
        return event not in self.queue  # as CUDA says of an event that was never recorded, too

    def synchronize_stream(self, stream: int, ordinal: int) -> None:
        self.catch_up(len(self.queue))

    def catch_up(self, steps: int) -> None:
        for _ in range(min(steps, len(self.queue))):
            job = self.queue.popleft()
            if not isinstance(job, int):
                super().copy([job], 0, 0)


class Kept(TorchMemory):
    """As on a device, where memory of the side stream stays what it is until that stream is through with it."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.taken: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        self.taken.append(super().take(size))
        return self.taken[-1]


class CopierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.device = Lagging()
        self.copier = Copier(self.device, Kept())
        self.sources: list[tuple[weakref.ref[Region], range]] = []
        self.arrived: list[tuple[torch.Tensor, bytes]] = []

    @rule(data=PIECES, fail=st.sampled_from(("", *FALLIBLE)))
    def copy(self, data: list[bytes], fail: str) -> None:
        # Those that went are accounted for, and the next may get their address.
        self.sources = [(region, place) for region, place in self.sources if region() is not None]
        slab = Slab.anonymous(8192)
        ranges = []
        for index, piece in enumerate(data):
            slab.array[index * 64 : index * 64 + len(piece)] = list(piece)
            ranges.append(SlabRange(slab, index * 64, len(piece)))
        self.sources.append((weakref.ref(slab.region), range(slab.address, slab.address + slab.size)))
        self.device.fail = fail
        buffer = self.copier.copy(ranges)
        failed = fail != "" and self.device.fail == ""
        self.device.fail = ""
        assert (buffer is None) == failed
        if buffer is not None:
            self.arrived.append((buffer, b"".join(data)))
        slab.close()

    @rule(steps=st.integers(0, 20))
    def catch_up(self, steps: int) -> None:
        self.device.catch_up(steps)

    @invariant()
    def what_is_read_is_held(self) -> None:
        pending = [job[1] for job in self.device.queue if not isinstance(job, int)]
        for region, addresses in self.sources:
            assert region() is not None or not any(address in addresses for address in pending)

    def teardown(self) -> None:
        self.copier.close()
        assert self.copier.under_way == 0
        assert all(region() is None for region, _ in self.sources)
        assert self.device.counts["create_event"] == self.device.counts["destroy_event"]
        for buffer, expected in self.arrived:
            assert bytes(buffer.numpy()) == expected


CopierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCopier = CopierMachine.TestCase


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 900), st.integers(0, 100)), max_size=12))
def test_merged_copies_move_the_same_bytes(shapes: list[tuple[int, int, int]]) -> None:
    slabs = [Slab.anonymous(1000), Slab.anonymous(1000)]
    for number, slab in enumerate(slabs):
        slab.array[:] = [(index * 7 + number) % 256 for index in range(1000)]
    ranges = [SlabRange(slabs[which], offset, size) for which, offset, size in shapes]
    expected = b"".join(bytes(part.slab.bytes_at(part.offset, part.size)) for part in ranges)
    target = Slab.anonymous(len(expected) + 1)
    copies = copies_of(ranges, target.address)
    assert len(copies) <= len(ranges)
    assert all(size > 0 for _, _, size in copies)
    NullDriver("a test").copy(copies, 0, 0)
    assert bytes(target.array[:-1]) == expected
