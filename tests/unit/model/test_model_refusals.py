"""What weights and gradients in Grace are refused beside, each with its reason; spelled off, nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from simpletuner_gh200.model.refusals import weights_refusal

AGAINST: tuple[dict[str, Any], ...] = (
    {"dynamo_backend": "inductor"},
    {"ramtorch": True},
    {"musubi_blocks_to_swap": 4},
    {"enable_group_offload": True},
    {"optimizer_release_gradients": True},
    {"optimizer_cpu_offload_method": "torchao"},
)


@pytest.mark.parametrize("config", AGAINST, ids=str)
def test_who_moves_the_same_or_steps_meanwhile_is_named(config: dict[str, Any]) -> None:
    ((key, value),) = config.items()
    assert f"{key} = {value!r}: " in str(weights_refusal(config))


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_shard_are_named(engine: str) -> None:
    assert engine in str(weights_refusal({}, f"DistributedType.{engine}"))


def test_what_is_off_is_no_reason() -> None:
    off = {
        "dynamo_backend": "no",
        "ramtorch": False,
        "musubi_blocks_to_swap": 0,
        "optimizer_cpu_offload_method": "none",
    }
    assert weights_refusal(off, "DistributedType.MULTI_GPU") is None
