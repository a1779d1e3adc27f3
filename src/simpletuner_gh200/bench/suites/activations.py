"""Activations in Grace: what the hooks cost per saved tensor, how much is moved, against others that do the same.

On CPU tensors: host memory stands in on both sides, so that these are costs of bookkeeping and copying, not of a link.

``us_per_tensor`` is CPU time of the thread, of a step with hooks less that of the same step without, for each tensor
that autograd saves. Nothing else is subtracted: calling the hooks (``us_per_tensor_doing_nothing``), both copies of
those that move (at most 1 KiB each), the memory they come back to and the step's own beginning and end are in it. About
half of these tensors are weights or too small and only looked at, as in a real model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from simpletuner_gh200.bench.suite import Suite, measure, one_torch_thread

WIDTH = 32
DEPTH = 24
ROWS = 4
"""Of the step whose bookkeeping is measured: tensors so small that copying them takes no time to speak of."""
LARGE = 2048
"""Rows of the step that is compared with others: its activations are large enough for copies to count."""


def measure_activations(quick: bool, _samples: int | None) -> dict[str, Any]:
    with one_torch_thread():
        cost = _cost(Blocks(ROWS), 5 if quick else 101)
        return {**cost, **_compared(Blocks(64 if quick else LARGE, width=256, depth=6), 3 if quick else 9)}


def _cost(blocks: Blocks, repeats: int) -> dict[str, Any]:
    """Thread time of a step with hooks less that of one without, for each tensor that it saves."""
    offloader = blocks.offloader()
    before = offloader.tensors, offloader.fetched
    blocks.step(blocks.offloading(offloader))
    tensors, moved = offloader.tensors - before[0], offloader.fetched - before[1]
    subjects = {
        "plain": lambda: blocks.step(nullcontext()),
        "ours": lambda: blocks.step(blocks.offloading(offloader)),
        "passing": lambda: blocks.step(_passing()),
    }
    seconds = measure(subjects, repeats=repeats).thread
    return {
        "us_per_tensor": (seconds["ours"] - seconds["plain"]) / tensors * 1e6,
        "us_per_tensor_doing_nothing": (seconds["passing"] - seconds["plain"]) / tensors * 1e6,
        "tensors": tensors,
        "moved": moved,
    }


def _compared(blocks: Blocks, repeats: int) -> dict[str, Any]:
    """Whole steps, as speed against each other: above 1 means that ours is faster."""
    import torch

    offloader = blocks.offloader()
    saved, moved = offloader.saved, offloader.moved
    blocks.step(blocks.offloading(offloader))
    share = (offloader.moved - moved) / (offloader.saved - saved)
    subjects = {
        "ours": lambda: blocks.step(blocks.offloading(offloader)),
        # With pinned memory, as people use it: where nothing can be pinned it still copies; without, it would not.
        "save_on_cpu": lambda: blocks.step(torch.autograd.graph.save_on_cpu(pin_memory=True)),
    }
    seconds = measure(subjects, repeats=repeats).thread
    return {
        "moved_vs_saved": share,
        "vs_save_on_cpu": seconds["save_on_cpu"] / seconds["ours"],
        "vs_upstream": None,  # it leaves CPU tensors alone; ``gh200 prove`` compares whole runs where there is a GPU
    }


class Blocks:
    """Attention-free transformer blocks: projections, activation, gate, norm and a residual, as image models have."""

    def __init__(self, rows: int, width: int = WIDTH, depth: int = DEPTH) -> None:
        import torch

        torch.manual_seed(1)
        nn = torch.nn
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)))
            for _ in range(depth)
        )
        self.inputs = torch.randn(rows, width)

    def forward(self) -> Any:
        import torch

        x = self.inputs
        for norm, up, down in self.layers:
            gate, value = torch.nn.functional.gelu(up(norm(x))).chunk(2, dim=-1)
            x = x + down(torch.cat((gate * value, value), dim=-1))
        return x

    def step(self, around: AbstractContextManager[object]) -> None:
        for weight in self.layers.parameters():
            weight.grad = None
        with around:
            out = self.forward()
        out.square().mean().backward()

    def offloader(self) -> Any:
        """One whose steps are measured, ordered and known already."""
        import torch

        from simpletuner_gh200.memory.lane import lanes
        from simpletuner_gh200.memory.slab import Slab
        from simpletuner_gh200.model.activations.arena import Arena, Room
        from simpletuner_gh200.model.activations.offload import Offloader

        arena = Arena(Slab.anonymous, 1 << 32)
        offloader = Offloader(lanes(torch.device("cpu")), arena, minimum=0, room=Room())
        for _ in range(3):
            self.step(self.offloading(offloader))
        return offloader

    def offloading(self, offloader: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = offloader.step("bench", self.layers.parameters, (self.inputs,))
        return context


def _passing() -> AbstractContextManager[object]:
    """Hooks that do nothing: the least that any of them costs."""
    import torch

    hooks: AbstractContextManager[object] = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda h: h)
    return hooks


SUITE = Suite(
    "activations",
    "Activations in Grace: microseconds per saved tensor, bytes moved, against others.",
    measure_activations,
)
