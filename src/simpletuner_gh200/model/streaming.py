"""An optimizer step over state that is staged through HBM, a few parameters at a time.

Weights and gradients whose home is the pool go with the state of their group.

An optimizer that passes over its state several times would cross the link as often. Here each group of parameters has
its state copied into one of two buffers, is stepped there, and copied back, while the other buffer is being filled or
emptied: every byte crosses once in each direction, both at the same time. The optimizer itself is not changed: it is
called once per group, and sees gradients of that group only. That gives the same result to the bit where parameters
do not meet in the step (``OptimizerFacts.streamable``).

No memory is taken for state here: it was at home before, and goes back there, whatever fails on the way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from simpletuner_gh200.memory.lane import Lane, Move, Ticket, spot_of
from simpletuner_gh200.memory.nested import tensors_in
from simpletuner_gh200.model.catching import CaughtOptimizer
from simpletuner_gh200.model.tensors import owns_its_storage, plain_tensors, size_of, view_of
from simpletuner_gh200.units import MIB

CHUNK = 256 * MIB
"""State of one group: long enough for full bandwidth, and twice that is little beside a model."""

ALIGNMENT = 256


def chunks(sizes: Sequence[int], room: int) -> list[range]:
    """Consecutive parameters whose state fits ``room`` together; a larger one has a chunk of its own. Pure."""
    found: list[range] = []
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and held + size > room:
            found.append(range(start, index))
            start, held = index, 0
        held += size
    if start < len(sizes):
        found.append(range(start, len(sizes)))
    return found


@dataclass
class _Staged:
    """The state of one chunk while it is in a buffer."""

    parameters: list[torch.Tensor]
    slot: int
    filled: Ticket = None
    homes: dict[int, torch.Tensor] = field(default_factory=dict)
    """Offset in the buffer, in bytes -> the memory in the pool that what is there came from."""
    stepped: bool = False
    """Else the bytes at home are still those in the buffer."""


class StreamedOptimizer:
    """Steps a caught optimizer chunk by chunk. Its state is in the pool before and after a step."""

    def __init__(self, caught: CaughtOptimizer, lanes: tuple[Lane, Lane], room: int = CHUNK) -> None:
        self._caught = caught
        self._out, self._in = lanes
        self._emptied: list[Ticket] = [None, None]
        """Of each buffer, the copies out of it."""
        self._room = room
        self._buffers: list[torch.Tensor] = []
        self._gradients: dict[int, torch.Tensor | None] = {}
        """During a step, by the parameter's id: those that are hidden as well."""
        self.steps = 0
        self.staged_bytes = 0

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the caught optimizer's own; the first step of a parameter, which makes its state, is not streamed.

        Nor is one with a closure, which would be called for every chunk; accelerate passes none as None.
        """
        has_closure = any(given is not None for given in (*args, *kwargs.values()))
        if has_closure or self._caught.makes_state():
            return self._caught.step(original, *args, **kwargs)
        parameters = [p for group in self._caught.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients = {id(parameter): parameter.grad for parameter in parameters}
        sizes = [sum(_aligned(size_of(part)) for part in self._pooled(parameter)) for parameter in parameters]
        planned = chunks(sizes, self._room)
        if not any(sizes):
            self._gradients = {}
            return self._caught.step(original, *args, **kwargs)
        self._make_buffers(max(sum(sizes[index] for index in chunk) for chunk in planned))
        result = None
        ahead: deque[_Staged] = deque()
        with _gradients_hidden(parameters, self._gradients) as show:
            try:
                for number in range(len(planned)):
                    for coming in range(number + len(ahead), min(number + 2, len(planned))):
                        ahead.append(_Staged([parameters[index] for index in planned[coming]], coming % 2))
                        self._fill(ahead[-1])
                    self._in.wait(ahead[0].filled)
                    ahead[0].stepped = True
                    with show(ahead[0].parameters):
                        result = original(*args, **kwargs)
                    self._empty(ahead[0])
                    ahead.popleft()
                for emptied in self._emptied:
                    self._out.wait(emptied)
            except BaseException:
                self._bring_home(ahead)
                raise
        self._gradients = {}
        self.steps += 1
        self._caught.sweep()
        return result

    def _parts(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its state, its gradient and itself."""
        for _keys, tensor in tensors_in(self._caught.optimizer.state.get(parameter, {})):
            yield from plain_tensors(tensor)
        for tensor in (self._gradients.get(id(parameter)), parameter):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                yield tensor

    def _pooled(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What state shares with its parameter stays where it is, as one thing."""
        held = self._caught.keeper.pool.holds
        parts = [part for part in self._parts(parameter) if held(part) and size_of(part) and owns_its_storage(part)]
        places = Counter(part.data_ptr() for part in parts)
        return [part for part in parts if places[part.data_ptr()] == 1]

    def _make_buffers(self, size: int) -> None:
        if self._buffers and self._buffers[0].numel() >= size:
            return
        self._buffers.clear()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._in.device) for _ in range(2)]

    def _fill(self, staged: _Staged) -> None:
        """State may have been written by the computing stream, and the buffer is read by what empties it."""
        buffer, offset = self._buffers[staged.slot], 0
        moves: list[Move] = []
        places: list[tuple[torch.Tensor, int]] = []
        for parameter in staged.parameters:
            for part in self._pooled(parameter):
                moves.append(((buffer.untyped_storage(), offset), spot_of(part), size_of(part)))
                places.append((part, offset))
                offset += _aligned(size_of(part))
        staged.filled = self._in.copy(moves, self._in.here(), self._emptied[staged.slot])
        for part, at in places:
            layout = part.dtype, part.size(), part.stride()
            place = view_of(buffer, layout, at // part.element_size())
            staged.homes[at] = part.data
            part.data = place
        self.staged_bytes += offset

    def _empty(self, staged: _Staged) -> None:
        buffer = self._buffers[staged.slot].untyped_storage()
        moves = [(spot_of(home), (buffer, at), size_of(home)) for at, home in staged.homes.items()]
        self._emptied[staged.slot] = self._out.copy(moves, self._out.here())
        for part in self._away(staged):
            part.data = _home_of(staged, part)

    def _away(self, staged: _Staged) -> list[torch.Tensor]:
        """What is in the buffer: also state that the step has made anew out of the memory there."""
        buffer = self._buffers[staged.slot].untyped_storage().data_ptr()
        parts = (part for parameter in staged.parameters for part in self._parts(parameter))
        return [part for part in parts if part.untyped_storage().data_ptr() == buffer]

    def _bring_home(self, ahead: Iterable[_Staged]) -> None:
        """After a failure: without the side streams, each part whatever becomes of the others.

        The buffers are not used again, so that what can't be copied even so keeps its bytes.
        """
        with ExitStack() as every_one:
            for staged in ahead:
                for part in self._away(staged):
                    every_one.callback(_bring_part_home, staged, part)
            self._buffers, self._emptied = [], [None, None]
            for lane in (self._in, self._out):
                every_one.callback(lane.settle)  # the last to be told is the first to be called


def _home_of(staged: _Staged, part: torch.Tensor) -> torch.Tensor:
    """A part that is another view of the buffer than what was copied in has that view of the home."""
    at = spot_of(part)[1]
    start = at if at in staged.homes else max(known for known in staged.homes if known <= at)
    home = staged.homes[start]
    return view_of(
        home, (part.dtype, part.size(), part.stride()), (spot_of(home)[1] + at - start) // part.element_size()
    )


def _bring_part_home(staged: _Staged, part: torch.Tensor) -> None:
    home = _home_of(staged, part)
    if staged.stepped:
        home.copy_(part.data, non_blocking=True)
    part.data = home


@contextmanager
def _gradients_hidden(
    parameters: list[torch.Tensor], gradients: dict[int, torch.Tensor | None]
) -> Iterator[Callable[[list[torch.Tensor]], Any]]:
    """No parameter has a gradient inside, but those that are shown for a while."""

    @contextmanager
    def show(some: list[torch.Tensor]) -> Iterator[None]:
        for parameter in some:
            parameter.grad = gradients[id(parameter)]
        try:
            yield
        finally:
            for parameter in some:
                gradients[id(parameter)], parameter.grad = parameter.grad, None

    try:
        for parameter in parameters:
            parameter.grad = None
        yield show
    finally:
        for parameter in parameters:
            parameter.grad = gradients[id(parameter)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
