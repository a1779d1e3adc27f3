"""``gh200_optimizations``: placement hints."""

from __future__ import annotations

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel, flag_from_text


class HintSettings(PartModel):
    enable_uvm_hints: bool | None = Field(
        default=None,
        description="Placement hints on batches and slabs. Overrides the environment; implied true by any cache of "
        "type unified_memory; false also returns the caches to standard.",
    )


PART = Part(
    block="gh200_optimizations",
    feature="hints",
    model=HintSettings,
    landed=False,
    environment={"enable_uvm_hints": "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"},
    from_environment={"enable_uvm_hints": flag_from_text},
)
