"""FSDP2 for real: SimpleTuner trains all weights of a tiny Flux, sharded by accelerate as the shipped file says.

On CPU ranks over gloo; ``probe_fsdp2.py`` lets accelerate shard there. Sharding on GPUs, over NCCL, never ran here.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.plan.steps import shard_bytes
from simpletuner_gh200.telemetry.reading import read_run
from tests.integration.flux_project import FSDP2, ROOT, SWITCH, FluxWorkbench, launcher_environment

STEPS = 3
WINDOWS = [1, 2, 2]
"""Of a ramp from one micro-batch a rank to two, over the first."""

pytestmark = [
    pytest.mark.one_release("4."),
    pytest.mark.skipif(version("simpletuner").startswith("3."), reason="SimpleTuner 3 trains no tiny Flux under FSDP2"),
]


@pytest.fixture(scope="module")
def flux(forge, tmp_path_factory):
    bench = FluxWorkbench(forge, tmp_path_factory.mktemp("flux"))
    bench.prepare()
    return bench


def settings(world: int) -> dict[str, Any]:
    return {
        **FSDP2,
        "max_train_steps": STEPS,
        "checkpoint_step_interval": 2,
        "checkpoints_total_limit": 9,
        "gradient_accumulation_steps": 2,
        "allow_dataset_oversubscription": True,
        "num_processes": world,
    }


def ours(world: int) -> dict[str, Any]:
    """Every block of the shipped example, with sizes for a tiny run."""
    example = json.loads((ROOT / "config" / "gh200_fsdp2_example.json").read_text())
    ramp = {"initial_effective_batch_size": 2 * world, "target_effective_batch_size": 4 * world}
    return {
        "cache_config": {**example["cache_config"], "cache_dir": "packs"},
        "gh200_optimizations": {**example["gh200_optimizations"], **ramp, "batch_rampup_steps": 1},
    }


def sharded(flux: FluxWorkbench, *, world: int, stock: bool) -> Any:
    """The whole run: stock, with the windows set by the test, or with everything of ours on."""
    configure(flux, world=world, stock=stock)
    return flux.known(stock=stock, world=world, probe=SWITCH, env=environment(WINDOWS, stock=stock))


def configure(flux: FluxWorkbench, *, world: int, stock: bool) -> None:
    if stock:
        flux.configure(**settings(world))
    else:
        flux.configure(blocks=ours(world), dataset={"type": "in_memory"}, **settings(world))


def environment(windows: list[int], *, stock: bool) -> dict[str, str]:
    by_hand = {"PROBE_WINDOWS": ",".join(map(str, windows))} if stock else {}
    return {**launcher_environment(), **by_hand}


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(folder / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"))


def assert_same(run: Any, reference: Any) -> None:
    """Losses of every micro-batch on every rank, and all weights, to the bit."""
    import torch

    assert run.ok, run.explain()
    assert reference.ok, reference.explain()
    assert run.losses == reference.losses
    mine, theirs = weights(run.output), weights(reference.output)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_sharded(run: Any, world: int) -> None:
    for record in run.records:
        assert record["distributed_type"] == "DistributedType.FSDP"
        assert record["sharded_parameters"] == record["parameters"] > 50
        assert record["checkpointed_blocks"] == 4
        rows = {int(length): size for length, size in record["rows"].items()}
        assert record["local_bytes"] == shard_bytes(rows, world), "a rank holds what `gh200 plan` counts"


def assert_all_on(run: Any, world: int) -> None:
    features = run.summaries[0]["features"]
    assert {name: features[name] for name in ("store", "caches", "ramp", "telemetry")} == dict.fromkeys(
        ("store", "caches", "ramp", "telemetry"), "on"
    )
    batches = [step["effective_batch"] for step in read_run(run.output).steps]
    assert batches == [2 * world * window for window in WINDOWS[-len(batches) :]]


def test_two_ranks_train_as_without_us(flux):
    reference, run = sharded(flux, world=2, stock=True), sharded(flux, world=2, stock=False)
    assert_same(run, reference)
    assert_sharded(run, 2)
    assert_sharded(reference, 2)
    assert_all_on(run, 2)
    assert len(run.losses[0]) == sum(WINDOWS)


def test_the_example_has_the_settings_that_were_trained():
    example = json.loads((ROOT / "config" / "gh200_fsdp2_example.json").read_text())
    assert {key: example[key] for key in FSDP2} == FSDP2
    assert example["model_type"] == "full", "SimpleTuner 4.10.1 saves no LoRA of a Flux under FSDP2"
    assert example["optimizer"] == "torch-adamw", "adamw_bf16 takes no fp32 weights, and accelerate keeps them so"


@pytest.mark.matrix
def test_two_ranks_resume_where_they_were(flux):
    resume(flux, world=2)


@pytest.mark.matrix
def test_four_ranks_train_and_resume_as_without_us(flux):
    reference, run = sharded(flux, world=4, stock=True), sharded(flux, world=4, stock=False)
    assert_same(run, reference)
    assert_sharded(run, 4)
    assert_all_on(run, 4)
    resume(flux, world=4)


@pytest.mark.matrix
def test_what_is_trained_is_kept_in_fp32_under_bf16(flux):
    flux.configure(**{**settings(2), "mixed_precision": "bf16", "max_train_steps": 1})
    run = flux.known(stock=True, world=2, probe=SWITCH, env=launcher_environment())
    assert run.ok, run.explain()
    assert run.records[0]["dtypes"] == ["torch.float32"]


def resume(flux: FluxWorkbench, *, world: int) -> None:
    """Both runs go on from their checkpoint in the ramp, and take the same last step."""
    stock, run = resumed(flux, world=world, stock=True), resumed(flux, world=world, stock=False)
    assert_same(run, stock)
    assert [len(losses) for losses in run.losses] == [WINDOWS[-1]] * world
    assert run.summaries[0]["global_step"] == STEPS


def resumed(flux: FluxWorkbench, *, world: int, stock: bool) -> Any:
    whole = sharded(flux, world=world, stock=stock)
    flux.go_on_from(whole)
    output = flux.project.output
    shutil.rmtree(output / "pipeline")
    for checkpoint in output.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)
    assert stock or json.loads((output / "checkpoint-2" / "gh200_state.json").read_text())["ramp"]
    run = flux.train(stock=stock, world=world, probe=SWITCH, env=environment(WINDOWS[-1:], stock=stock))
    flux.set_aside(run)
    return run
