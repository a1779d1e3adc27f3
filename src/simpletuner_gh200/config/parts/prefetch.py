"""``gh200_optimizations``: batches prepared ahead on the device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel


class PrefetchSettings(PartModel):
    enable_prefetch: bool = Field(
        default=True,
        description="Copy batches of unified caches to the device on a side stream, without the CPU waiting.",
    )
    prefetch_depth: Literal["auto"] | int = Field(
        default="auto",
        description="Batches under way at once: a number from 1, or auto to follow the measured lead time.",
    )


def _check(model: PartModel) -> list[tuple[str, str]]:
    assert isinstance(model, PrefetchSettings)
    depth = model.prefetch_depth
    return [("prefetch_depth", f"{depth} is below 1")] if isinstance(depth, int) and depth < 1 else []


PART = Part(block="gh200_optimizations", feature="prefetch", model=PrefetchSettings, landed=True, check=_check)
