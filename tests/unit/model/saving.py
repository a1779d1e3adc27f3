"""An engine over host memory, and gradients with and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from simpletuner_gh200.memory.lane import Lane, lanes
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.model.activations.arena import Arena, Room
from simpletuner_gh200.model.activations.offload import Offloader


class FixedRoom(Room):
    def __init__(self, size: int) -> None:
        self.size = size

    def bytes(self) -> int:
        return self.size


class Engine(Offloader):
    """With its arena in reach, and room in HBM that a test can change."""

    def __init__(
        self,
        *,
        limit: int = 1 << 30,
        room: int = 0,
        out: Lane | None = None,
        back: Lane | None = None,
        **options: Any,
    ) -> None:
        self.arena = Arena(lambda size: Slab.anonymous(size, label="activations"), limit)
        self.hbm = FixedRoom(room)
        options = {"minimum": 0, "grace_limit": limit, **options}
        plain = lanes(torch.device("cpu"))
        super().__init__((out or plain[0], back or plain[1]), self.arena, room=self.hbm, **options)

    def run(
        self,
        forward: Callable[[], torch.Tensor],
        weights: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor] = (),
        shape: str = "a",
    ) -> list[torch.Tensor]:
        """Gradients of the weights, the forward pass inside a step."""
        weights = list(weights)
        with self.step(shape, lambda: weights, inputs):
            loss = forward()
        return gradients(loss, weights)


def gradients(loss: torch.Tensor, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss.sum(), [weight for weight in weights if weight.requires_grad]))


def same(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def layers(count: int = 4, width: int = 16) -> torch.nn.Sequential:
    torch.manual_seed(1)

    def block() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width))

    return torch.nn.Sequential(*(block() for _ in range(count)))
