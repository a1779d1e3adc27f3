"""``gh200_optimizations``: placement hints."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel, flag_from_text

VARIABLE = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"


class HintSettings(PartModel):
    enable_uvm_hints: bool | None = Field(
        default=None,
        description="Placement hints on batches and slabs. Overrides the environment; implied true by any cache of "
        "type unified_memory; false also returns the caches to standard.",
    )


def switch_in(environment: Mapping[str, str]) -> bool | None:
    """What the environment says about hints; None where it says nothing. Raises ValueError for anything else."""
    text = environment.get(VARIABLE)
    return flag_from_text(text) if text else None


PART = Part(
    block="gh200_optimizations",
    feature="hints",
    model=HintSettings,
    landed=True,
    environment={"enable_uvm_hints": VARIABLE},
    from_environment={"enable_uvm_hints": flag_from_text},
)
