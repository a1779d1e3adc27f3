"""``gh200_optimizations``: batches prepared ahead on the device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel


class PrefetchSettings(PartModel):
    enable_prefetch: bool = Field(default=True, description="Prepare coming batches on the device.")
    prefetch_depth: Literal["auto"] | int = Field(
        default="auto", description="Batches ahead: a number from 1, or auto to follow the measured lead time."
    )


def _check(model: PartModel) -> list[tuple[str, str]]:
    assert isinstance(model, PrefetchSettings)
    depth = model.prefetch_depth
    return [("prefetch_depth", f"{depth} is below 1")] if isinstance(depth, int) and depth < 1 else []


PART = Part(block="gh200_optimizations", feature="prefetch", model=PrefetchSettings, landed=False, check=_check)
