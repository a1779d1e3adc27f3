"""Weights and gradients in Grace in real SimpleTuner, host memory on both sides: the same bits, and they do move."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_activations_training import families
from tests.integration.workbench import RANKS, JobResult
from tests.page_cache import cached_bytes, settled

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


@pytest.mark.parametrize("world", RANKS)
def test_a_lora_is_the_same_to_the_bit(workbench, world: int) -> None:
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    files = {path.parent.name: settled(path) for path in workbench.project.model.rglob("*.safetensors")}
    assert all(cached_bytes(path) for path in files.values())
    workbench.configure(blocks={"gh200_optimizations": GRACE})
    run = workbench.train(world=world)
    found = told(run)
    assert run.losses == stock.losses
    assert run.weights() == stock.weights()
    steps = len(run.losses[0])
    assert found["weights"]["late"] <= 2 * found["weights"]["blocks"] + steps, "in the first step, else ahead of use"
    assert found["weights"]["kept_by_others"] == 0
    denoiser = files.pop("unet").stat().st_size
    assert denoiser / 2 < found["loading"]["given_back_behind_blocks"] < denoiser
    assert cached_bytes(files["vae"]) == 0, "text encoders may still be mapped, where a release holds them"


@pytest.mark.one_release("3.")
def test_a_lora_with_checkpointing(workbench) -> None:
    workbench.configure(gradient_checkpointing=True)
    stock = workbench.known(stock=True)
    workbench.configure(blocks={"gh200_optimizations": GRACE}, gradient_checkpointing=True)
    run = workbench.train()
    assert told(run)["weights"]["kept_by_others"] == 0
    assert run.losses == stock.losses
    assert run.weights() == stock.weights()


ALL = {**GRACE, "use_uvm": True, "uvm_streaming": "on", "activations": "grace", "activation_min_tensor_kb": 0}
WAYS = {
    "plain": ({}, GRACE),
    "checkpointed": ({"gradient_checkpointing": True}, GRACE),
    "some blocks stay": ({}, {**GRACE, "weights_hbm_budget_gb": 500_000 / 1024**3}),
    "everything else on": ({"use_ema": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, ALL),
    "checkpointed, everything": ({"gradient_checkpointing": True, "gradient_accumulation_steps": 2}, ALL),
    "gradients kept as zeros": ({"gradient_accumulation_steps": 2, "set_grads_to_none": False}, GRACE),
    "bf16": ({"mixed_precision": "bf16"}, GRACE),
    "fused": ({"optimizer_config": "fused=true"}, ALL),
}
ONE = pytest.param("everything else on", marks=pytest.mark.one_release("4."))


@pytest.mark.parametrize(
    "way", [ONE, *(pytest.param(way, marks=pytest.mark.matrix) for way in WAYS if way != ONE.values[0])]
)
def test_a_full_fine_tune_and_its_resume(workbench, way: str) -> None:
    """Losses, weights, EMA and checkpoints of the first steps, and of those after a resume."""
    other, block = WAYS[way]
    runs: dict[str, tuple[JobResult, JobResult]] = {}
    for name, blocks in (("stock", {}), ("ours", {"gh200_optimizations": block})):
        legs = []
        for steps in (2, 4):
            workbench.configure(
                blocks=blocks,
                max_train_steps=steps,
                checkpoint_step_interval=2,
                checkpoints_total_limit=9,
                **FULL | other,
            )
            if legs:
                workbench.go_on_from(legs[0])
            legs.append(workbench.train(stock=name == "stock"))
            assert legs[-1].ok, legs[-1].explain()
            workbench.set_aside(legs[-1])
        runs[name] = legs[0], legs[1]
    for ours, stock in zip(runs["ours"], runs["stock"], strict=True):
        found = told(ours)
        assert ours.losses == stock.losses
        assert ours.weights() == stock.weights()
        assert (found["weights"]["hbm_blocks"] > 0) == (way == "some blocks stay")
        if block is ALL:
            assert found["state"]["streamed_steps"] > 0
            assert found["activations"]["moved"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["checkpointed", "everything else on"])
def test_a_full_fine_tune_on_two_ranks(workbench, way: str) -> None:
    """Without a checkpoint on the way: with one, one rank leaves stock's own last barrier to the other, which fails."""
    other, block = {**WAYS, "checkpointed": ({"gradient_checkpointing": True}, GRACE)}[way]
    runs = []
    for blocks in ({}, {"gh200_optimizations": block}):
        workbench.configure(blocks=blocks, max_train_steps=3, checkpoint_step_interval=99, **FULL | other)
        runs.append(workbench.train(stock=not blocks, world=2))
        assert runs[-1].ok, runs[-1].explain()
        workbench.set_aside(runs[-1])
    stock, ours = runs
    for rank in range(2):
        assert (told(ours, rank)["state"]["streamed_steps"] > 0) if block is ALL else told(ours, rank)
    assert ours.losses == stock.losses
    assert ours.weights() == stock.weights()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "precision", ["int8-quanto", "int8-torchao", pytest.param("int8-sdnq", marks=pytest.mark.one_release("4."))]
)
def test_a_quantised_base_comes_as_plain_tensors_or_is_refused(workbench, precision: str) -> None:
    """Of the tiny model's blocks torchao's wrappers hold less than what is plain, and stay."""
    quantised = {"mixed_precision": "bf16", "base_model_precision": precision, "quantize_via": "cpu"}
    workbench.configure(blocks={"gh200_optimizations": GRACE}, **quantised)
    ours = workbench.train()
    if precision == "int8-quanto":
        assert not ours.ok
        assert "most bytes of the blocks are quantised, and in WeightQBytesTensor" in ours.log()
        return
    told(ours)
    workbench.set_aside(ours)
    workbench.configure(**quantised)
    stock = workbench.train(stock=True)
    assert stock.ok, stock.explain()
    assert ours.losses == stock.losses
    assert ours.weights() == stock.weights()


OTHERS = ("sd3", "sdxl", "qwen", "wan", "pixart", "z_image", "flux2", "ltx", "sana", "auraflow")


@pytest.mark.parametrize("family", ["flux", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)])
def test_every_family_and_precision(workbench, family: str) -> None:
    """SimpleTuner's own model classes, in full and as LoRA, in fp32, bf16 and under autocast, with poisoned slots."""
    found = families(workbench, family, compared="in_slots")
    assert len(found) >= 4
    for case, result in found.items():
        assert result["blocks"] > 2, case
        assert all(result["plain"] + result["checkpointed"]), case
        assert (result["kept"], result["failed"]) == (0, 0), case
        assert result["moved"] > 0, case
        assert result["late plain"] <= 2 * result["blocks"], (case, "in the first step, else ahead of use")
