"""What weights in slots cost on a machine: the link both ways beside kernels, a block in place, a block that is late.

Each answer is seconds by the device's clock. Without a device the same code runs on host memory, which says nothing
about a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from simpletuner_gh200.diagnostics.selftest.bench import best_seconds
from simpletuner_gh200.memory.lane import lanes, spot_of
from simpletuner_gh200.model.blocks import find_blocks
from simpletuner_gh200.model.slots import WeightStream
from simpletuner_gh200.model.tensors import move_to
from simpletuner_gh200.units import GIB

if TYPE_CHECKING:
    from simpletuner_gh200.model.catching import StatePool

DEPTH = 6
WIDTH, TOKENS = 8192, 4096
"""A matrix of 128 MiB, and about the tokens of a picture of 1024 pixels."""


class OneAfterTheOther(nn.Module):  # type: ignore[misc]
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def both_ways(device: torch.device, pool: StatePool, size: int = GIB, width: int = WIDTH) -> dict[str, float]:
    """8: copies each way at once, alone and while kernels run, and what the kernels lose by it."""
    (out, back), near = lanes(device), [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    far = [pool.take(one) for one in near]
    square = torch.zeros(width, width, dtype=torch.bfloat16, device=device)

    def copies(meanwhile: Callable[[], Any] = lambda: None) -> None:
        gone = out.copy([(spot_of(far[0]), spot_of(near[0]), size)], out.here())
        come = back.copy([(spot_of(near[1]), spot_of(far[1]), size)], back.here())
        meanwhile()
        out.wait(gone)
        back.wait(come)

    def kernels() -> None:
        for _ in range(4):
            torch.mm(square, square)

    found = {name: best_seconds(out, work) for name, work in (("copies", copies), ("kernels", kernels))}
    return {**found, "together": best_seconds(out, partial(copies, kernels)), "gb_each_way": size / 1e9}


def in_place_or_slots(
    device: torch.device, pool: StatePool, width: int = WIDTH, tokens: int = TOKENS
) -> dict[str, float]:
    """9: a layer whose weight is read over the link, brought into a slot first, or there."""
    lane = lanes(device)[1]
    near = torch.zeros(width, width, dtype=torch.bfloat16, device=device)
    inputs, far = torch.zeros(tokens, width, dtype=near.dtype, device=device), pool.take(near)

    def brought() -> None:
        lane.wait(lane.copy([(spot_of(near), spot_of(far), near.nbytes)], lane.here()))
        torch.mm(inputs, near)

    ways: dict[str, Callable[[], Any]] = {
        "in_place": partial(torch.mm, inputs, far),
        "brought": brought,
        "there": partial(torch.mm, inputs, near),
    }
    return {name: best_seconds(lane, work) for name, work in ways.items()}


def late_weight(device: torch.device, pool: StatePool, width: int = WIDTH, tokens: int = TOKENS) -> dict[str, float]:
    """10: a step whose blocks come ahead of their use, and one in which each is fetched when it is needed."""
    layers = (nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16) for _ in range(DEPTH))
    model = OneAfterTheOther(nn.Sequential(layer) for layer in layers)
    for weight in model.requires_grad_(False).parameters():
        move_to(weight, pool.take(weight.data))
    inputs = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    found = {}
    for name, slots in (("ahead", 2), ("late", 1)):
        stream = WeightStream(find_blocks([model]), lanes(device)[1], slots=slots)
        stream.install([model])

        def step(stream: WeightStream = stream) -> None:
            with stream.step():
                out = model(inputs)
            out.sum().backward()
            stream.go_home()

        found[name] = best_seconds(lanes(device)[0], step)
        stream.remove()
    return {**found, "late_per_block": (found["late"] - found["ahead"]) / (2 * DEPTH - 1)}


QUESTIONS = {8: both_ways, 9: in_place_or_slots, 10: late_weight}
