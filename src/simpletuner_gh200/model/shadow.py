"""The shadow of an EMA: a list of tensors that live in the pool, and stay there through every update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from simpletuner_gh200.model.catching import Keeper, Tally


class CaughtShadow:
    name = "ema"

    def __init__(self, ema: Any, keeper: Keeper) -> None:
        """``ema`` keeps its tensors in ``shadow_params`` and gives them new memory in place, or new tensors."""
        self.ema = ema
        self._keeper = keeper
        self.tally = Tally()

    def sweep(self) -> None:
        """Tensors that are elsewhere, because they were made before the pool or moved since, get their home."""
        self.tally = self._keeper.sweep(self.name, self._tensors())

    @property
    def temporaries(self) -> int:
        """Device memory that an update needs for a moment: with foreach, another copy of everything."""
        return self.tally.bytes if getattr(self.ema, "foreach", False) else 0

    def _tensors(self) -> Iterator[tuple[torch.Tensor, None]]:
        for tensor in self.ema.shadow_params:
            yield tensor, None
