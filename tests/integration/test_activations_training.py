"""Activations in Grace in real SimpleTuner, host memory on both sides: the same bits, and they do move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workbench import RANKS, JobResult

GRACE = {"activations": "grace", "activation_min_tensor_kb": 0}
FAMILIES = Path(__file__).with_name("activation_families.py")
OTHERS = ("sd3", "sdxl", "qwen", "wan", "pixart", "z_image")


def told(run: JobResult) -> dict[str, Any]:
    assert run.ok, run.explain()
    return run.summaries[0]["details"]["activations"]


@pytest.mark.parametrize("world", RANKS)
def test_a_lora_is_the_same_to_the_bit(workbench, world: int) -> None:
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    workbench.configure(blocks={"gh200_optimizations": GRACE})
    run = workbench.train(world=world)
    found = told(run)
    assert run.losses == stock.losses
    assert run.weights() == stock.weights()
    left = json.loads((run.output / "gh200" / "summary.json").read_text())
    assert left["details"]["activations"] == found
    steps = len(run.losses[0])
    assert found["tensors"] > 100 * steps
    assert found["moved"] > 0
    assert found["moved"] == found["brought"]
    assert found["saved"] >= found["moved"]
    assert found["shared"] > 0, "storages that are saved twice are moved once"
    assert found["slabs"] == 1, "nothing was allocated after the first step"
    # 3.1 saves more in some steps than in others of the same shape; each kind is learned when it first comes.
    learned = 1 + found["surprises"]
    assert found["surprises"] <= 2
    assert found["fetched_late"] < learned * found["tensors"] / steps + 2 * steps, "else ahead of use"
    assert (found["failed"], found["stayed_for_want_of_room"]) == (0, 0)


@pytest.mark.one_release("3.")
def test_checkpointing_is_switched_off_for_blocks_that_are_moved(workbench) -> None:
    """Of what CPU memory has no room for blocks are recomputed; the bits are those of a run without checkpointing."""
    stock = workbench.known(stock=True)
    workbench.configure(blocks={"gh200_optimizations": GRACE}, gradient_checkpointing=True, max_train_steps=3)
    (shape,) = told(workbench.known())["shapes"]
    assert shape["blocks"]["recompute"] == 0
    assert shape["blocks"]["offload"] > 5
    half = {**GRACE, "activation_limit_gb": shape["offloaded_bytes"] / 2 / 1024**3}
    workbench.configure(blocks={"gh200_optimizations": half}, gradient_checkpointing=True)
    run = workbench.train()
    (shape,) = told(run)["shapes"]
    assert run.losses == stock.losses
    assert run.weights() == stock.weights()
    assert shape["blocks"]["recompute"] > 0
    assert shape["blocks"]["offload"] > 0
    assert told(run)["held_bytes"] <= half["activation_limit_gb"] * 1024**3
    assert "gradient checkpointing is on, and switched off for each block" in run.log()


@pytest.mark.one_release("3.")
def test_what_it_was_not_tested_with_is_refused(workbench) -> None:
    workbench.configure(blocks={"gh200_optimizations": GRACE}, dynamo_backend="inductor")
    run = workbench.train()
    assert run.exit_codes == [2], run.explain()
    assert "activations = 'grace' can't work here: not tested together with dynamo_backend = 'inductor'" in run.log()


def families(workbench, *names: str, compared: str = "compare") -> dict[str, Any]:
    asked = {"FAMILIES": names, "COMPARED": compared}
    run = workbench.execute(f"import runpy; runpy.run_path({str(FAMILIES)!r}, {asked!r})")
    assert run.ok, run.explain()
    return json.JSONDecoder().raw_decode(run.log().partition("RESULT ")[2])[0]


@pytest.mark.parametrize("family", ["flux", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)])
def test_every_family_and_precision(workbench, family: str) -> None:
    """SimpleTuner's own model classes, in full and as LoRA, in fp32, bf16 and under autocast."""
    found = families(workbench, family)
    assert len(found) == (4 if family == "z_image" else 6)
    for case, result in found.items():
        assert result["trained"] > 5, case
        assert result["moved"]["same"], case
        assert result["mixed"]["same"], case
        assert result["moved"]["moved"] > 0, case
        assert result["moved"]["blocks"]["recompute"] == 0, case
        assert result["mixed"]["blocks"]["recompute"] > 0, case
        assert result["moved"]["surprises"] == result["mixed"]["surprises"] == 0, case
        assert result["moved"]["late"] < 2 * result["moved"]["fetched"] / 3, case


CHECKPOINTED = {"gradient_checkpointing": True}
OTHER_SETTINGS = {
    "interval": {**CHECKPOINTED, "gradient_checkpointing_interval": 2},
    "bf16": {"mixed_precision": "bf16"},
    "quantised": {"mixed_precision": "bf16", "base_model_precision": "int8-quanto"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_beside_other_settings_of_simpletuners(workbench, name: str) -> None:
    other = {**OTHER_SETTINGS[name], "max_train_steps": 3}
    workbench.configure(**other)
    reference = workbench.known(stock=True)
    assert reference.ok, reference.explain()
    workbench.configure(blocks={"gh200_optimizations": GRACE}, **other)
    run = workbench.train()
    assert told(run)["moved"] > 0
    assert run.losses == reference.losses
    assert run.weights() == reference.weights()
