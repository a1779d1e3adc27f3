"""Weights and gradients in Grace in real SimpleTuner, host memory on both sides: the same bits, and they do move."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.workbench import RANKS, JobResult

GRACE = {"weights": "grace", "gradients": "grace", "uvm_min_tensor_kb": 0}
FULL = {"model_type": "full", "lora_type": None, "lora_rank": None, "optimizer": "torch-adamw", "learning_rate": 1e-4}


def told(run: JobResult, rank: int = 0) -> dict[str, Any]:
    assert run.ok, run.explain()
    details = run.summaries[rank]["details"]
    assert details["weights"]["blocks"] > 2
    assert details["weights"]["bytes"] > 0
    assert details["weights"]["streamed"] > details["weights"]["bytes"]
    assert (details["weights"]["failed"], details["gradients"]["failed"]) == (0, 0)
    assert details["gradients"]["tensors"] > 0
    return details


def weights(run: JobResult) -> dict[str, bytes]:
    """Every file of weights that the run left, those of checkpoints and of EMA among them."""
    found = {str(path.relative_to(run.output)): path.read_bytes() for path in run.output.rglob("*.safetensors")}
    assert found
    return found


@pytest.mark.parametrize("world", RANKS)
def test_a_lora_is_the_same_to_the_bit(workbench, world: int) -> None:
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    workbench.configure(blocks={"gh200_optimizations": GRACE})
    run = workbench.train(world=world)
    found = told(run)
    assert run.losses == stock.losses
    assert weights(run) == weights(stock)
    steps = len(run.losses[0])
    assert found["weights"]["late"] <= 2 * found["weights"]["blocks"] + steps, "in the first step, else ahead of use"
    assert found["weights"]["kept_by_others"] == 0
