"""``in_memory`` in a dataset entry of type ``in_memory``."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel

MOST_WORKERS = 72
"""Cores of a Grace CPU; more loader threads than that were never useful to the earlier system either."""


class InMemorySettings(PartModel):
    compression: Literal["lz4", "zlib", "snappy", "zstd", "auto"] | None = Field(
        default=None, description="Codec of what is held; unset: raw."
    )
    num_workers: int | None = Field(
        default=None, ge=1, description=f"Staging threads; unset: the machine's cores, {MOST_WORKERS} at most."
    )
    memory_limit_gb: float | None = Field(
        default=None, gt=0, strict=False, description="Hard ceiling, in GiB, on what is held."
    )
    max_corruption_rate: float = Field(
        default=0.01, ge=0, le=1, strict=False, description="Share of broken images above which the run stops."
    )
    verify: Literal["header", "decode", "none"] = Field(
        default="header", description="How images are checked while they are staged."
    )
    file_extensions: tuple[str, ...] | None = Field(
        default=None, strict=False, description="Stage only these; unset: every file."
    )
    per_node: Literal["all", "shard"] = Field(
        default="all", description="Stage all of the dataset on each node, or only what its ranks read."
    )

    def workers(self) -> int:
        return self.num_workers or min(MOST_WORKERS, os.cpu_count() or 1)


PART = Part(block="in_memory", feature="store", model=InMemorySettings, landed=True)
