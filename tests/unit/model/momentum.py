"""An optimizer in the shape of torch's, without the seconds that torch's own takes to import its compiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class Momentum:
    def __init__(self, weights: list[torch.nn.Parameter], lr: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": weights, "lr": lr}]
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        own = state["momentum"] = torch.zeros_like(weight)
                        own.add_(1)  # a variable of its own must be what is in the state
                        state.update({"square": torch.zeros_like(weight)})
                    state["momentum"].add_(weight.grad)
                    state["square"].add_(weight.grad**2)
                    weight.sub_(group["lr"] * state["momentum"])

    def load_state_dict(self, loaded: dict[Any, dict[str, Any]]) -> None:
        self.state.clear()
        self.state.update(loaded)
