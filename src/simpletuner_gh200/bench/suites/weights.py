"""Weights in slots: what bringing a block costs beyond the copy, how much is moved, a step against one without.

On CPU tensors: host memory stands in on both sides, so that these are costs of bookkeeping, not of a link. CPU time of
the thread. ``us_per_block`` is that of a step with slots less that of the same step without and less the copies alone,
for each time that a block was brought; hooks, pointing fourteen parameters there and back, and what hooks on saved
tensors add to each of them, weight or not, are in it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from simpletuner_gh200.bench.suite import Suite, measure, one_torch_thread

DEPTH = 24
ROWS = 4
"""Of the step whose bookkeeping is measured; of the one whose speed is compared."""
LARGE = 1024


def measure_weights(quick: bool, _samples: int | None) -> dict[str, Any]:
    with one_torch_thread():
        plain, stack, repeats = SlotStack(ROWS, 32, DEPTH), SlotStack(ROWS, 32, DEPTH), 5 if quick else 101
        stream = stack.stream()
        before = stream.streamed
        stack.streamed(stream)
        moved, size = stream.streamed - before, stream.blocks[0].size
        brought = moved // size
        seconds = measure(
            {
                "plain": lambda: plain.step(nullcontext()),
                "ours": lambda: stack.streamed(stream),
                "copies": lambda: stack.copies(stream, brought),
            },
            repeats=repeats,
        ).thread
        return {
            "us_per_block": (seconds["ours"] - seconds["plain"] - seconds["copies"]) / brought * 1e6,
            "us_per_copy": seconds["copies"] / brought * 1e6,
            "moved_vs_needed": moved / (size * (2 * DEPTH - 2)),  # backward begins with the two that are there
            "blocks": brought,
            **_compared(32 if quick else LARGE, 3 if quick else 9),
        }


def _compared(rows: int, repeats: int) -> dict[str, Any]:
    """As speed: below 1 means that ours is slower. Copies are the thread's own work here; on a device they are not."""
    plain, stack = SlotStack(rows, 256, 6), SlotStack(rows, 256, 6)
    stream = stack.stream()
    seconds = measure(
        {
            "plain": lambda: plain.step(nullcontext()),
            "ours": lambda: stack.streamed(stream),
        },
        repeats=repeats,
    ).thread
    return {
        "step_vs_plain": seconds["plain"] / seconds["ours"],
        "vs_ramtorch": None,  # these two move weights to a GPU, and do nothing without one
        "vs_block_swap": None,
    }


class SlotStack:
    """Blocks with as many weights as those of a diffusion transformer."""

    def __init__(self, rows: int, width: int, depth: int) -> None:
        import torch

        torch.manual_seed(1)
        self.inputs = torch.randn(rows, width)
        self.model = _model(width, depth)

    def step(self, around: AbstractContextManager[object]) -> None:
        for weight in self.model.parameters():
            weight.grad = None
        with around:
            out = self.model(self.inputs)
        out.square().mean().backward()

    def streamed(self, stream: Any) -> None:
        self.step(stream.step())
        stream.go_home()

    def stream(self) -> Any:
        """One that knows the order already."""
        import torch

        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.model.blocks import find_blocks
        from simpletuner_gh200.model.slots import WeightStream

        stream = WeightStream(find_blocks([self.model]), lanes(torch.device("cpu"))[1])
        stream.install([self.model])
        for _ in range(3):
            self.streamed(stream)
        return stream

    def copies(self, stream: Any, count: int) -> None:
        import torch

        from simpletuner_gh200.memory.lane import Lane, spot_of

        lane, blocks = Lane(torch.device("cpu")), stream.blocks
        slot = torch.empty(blocks[0].size, dtype=torch.uint8).untyped_storage()
        for at in range(count):
            pieces = blocks[at % len(blocks)].pieces
            lane.copy(((slot, piece.offset), spot_of(piece.parameter), piece.size) for piece in pieces)


def _model(width: int, depth: int) -> Any:
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            inner = self.norm(x)
            mixed = functional.softmax(self.query(inner) @ self.key(inner).t(), dim=-1) @ self.value(inner)
            return x + self.down(functional.gelu(self.up(self.out(mixed))))

    class Layers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer() for _ in range(depth))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    return Layers()


SUITE = Suite("weights", "Weights in slots: microseconds per block, bytes moved, a step against one.", measure_weights)
