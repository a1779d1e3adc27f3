"""``gh200_optimizations``: memory beyond HBM for torch's own allocations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel, flag_from_text


class OversubscriptionSettings(PartModel):
    use_uvm: bool = Field(default=False, description="Route torch's allocations through a managed memory pool.")
    uvm_oversubscription_ratio: float = Field(
        default=5.0, gt=0, strict=False, description="Byte limit of the pool, as a multiple of HBM."
    )
    uvm_access_pattern: Literal["gpu_first", "balanced", "cpu_first"] = Field(
        default="gpu_first", description="Where pages of the pool prefer to live."
    )
    uvm_scope: Literal["optimizer", "all"] = Field(
        default="optimizer", description="Which allocations go there: optimizer state and EMA, or all."
    )


PART = Part(
    block="gh200_optimizations",
    feature="oversubscription",
    model=OversubscriptionSettings,
    landed=True,
    environment={
        "use_uvm": "GH200_USE_UVM",
        "uvm_oversubscription_ratio": "GH200_UVM_OVERSUBSCRIPTION_RATIO",
        "uvm_access_pattern": "GH200_UVM_ACCESS_PATTERN",
    },
    from_environment={"use_uvm": flag_from_text, "uvm_oversubscription_ratio": float},
)
