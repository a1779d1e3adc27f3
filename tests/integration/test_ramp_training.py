"""The batch ramp in unmodified SimpleTuner: windows, losses, rates, and when things fire."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from simpletuner_gh200.ramp.outlook import whole_windows
from simpletuner_gh200.ramp.schedule import GH200GradientRamp
from tests.integration.workbench import OLDEST_ALONE, RANKS, probe, ramp

PROBE = probe("ramp")
STEPS = 10


def block(world: int = 1, **keys: Any) -> dict[str, Any]:
    return {"gh200_optimizations": ramp(2 * world, 8 * world, 14, **keys)}


def schedule(world: int = 1, **keys: Any) -> GH200GradientRamp:
    return GH200GradientRamp(2 * world, 8 * world, 14, train_batch_size=2, world_size=world, **keys)


def window_means(losses: list[list[str]], windows: list[int]) -> list[float]:
    """The mean loss of each window over its micro-batches and all ranks."""
    by_micro_batch = [fmean(float.fromhex(loss) for loss in ranks) for ranks in zip(*losses, strict=True)]
    means, start = [], 0
    for length in windows:
        means.append(fmean(by_micro_batch[start : start + length]))
        start += length
    return means


@pytest.mark.parametrize("world", RANKS)
def test_windows_losses_and_rates_are_right(workbench, world):
    scheduler = {"lr_scheduler": "polynomial", "lr_warmup_steps": 2}
    workbench.configure(max_train_steps=STEPS, **scheduler)
    stock = workbench.train(stock=True, world=world, probe=PROBE)
    assert stock.ok, stock.explain()
    workbench.restore()
    workbench.configure(blocks=block(world), max_train_steps=STEPS, **scheduler)
    run = workbench.train(world=world, probe=PROBE)
    assert run.ok, run.explain()

    windows = [window.accumulation for window in schedule(world).windows(STEPS)]
    assert windows == [1, 1, 1, 1, 1, 1, 2, 2, 3, 4]
    for record in run.records:
        assert record["windows"] == windows
        assert record["weights"] == pytest.approx([1.0] * STEPS, abs=4 * 2**-53)
        assert record["scheduler_steps"] == STEPS
    logged = run.records[0]["logged"]
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    # Upstream adds float32 losses up in double precision, one rounding per rank and micro-batch.
    assert [row["train_loss"] for row in logged] == pytest.approx(
        window_means(run.losses, windows), rel=2**-24 * (world + 1)
    )
    assert [row["learning_rate"] for row in logged] == [row["learning_rate"] for row in stock.records[0]["logged"]]
    assert [row["gh200/effective_batch_size"] for row in logged] == [2 * world * length for length in windows]
    # A status event goes out with each checkpoint, whether or not anyone listens.
    assert [4, 2 * world] in run.records[0]["events"]
    assert [8, 4 * world] in run.records[0]["events"]
    assert run.summaries[0]["details"]["ramp"]["windows"] == windows
    # SimpleTuner writes its configuration down, with everything that hangs on it: the target, and nothing of ours.
    written = json.loads((run.output / "simpletuner_config.json").read_text())
    assert written["gradient_accumulation_steps"] == 4

    lines = run.records[0]["lines"]
    initial, target = 2 * world, 8 * world
    enabled = f"GH200 gradient accumulation ramp enabled (initial={initial}, target={target}, ramp_steps=14)"
    assert ["INFO", enabled] in lines
    assert ["DEBUG", "GH200 ramp adjusted gradient_accumulation_steps -> 3"] in lines
    assert enabled in run.log()


VALIDATION = {
    "validation_disable": False,
    "validation_prompt": "a red circle",
    "validation_step_interval": 4,
    "validation_epoch_interval": 1,
    "validation_num_inference_steps": 1,
    "validation_resolution": "64x64",
    "validation_guidance": 1.0,
    "num_validation_images": 1,
}


def test_nothing_fires_in_mid_window_and_nothing_is_missed(workbench):
    """Scheduled, epoch-end and manual validations and checkpoints, and uploads, over windows of changing size."""
    workbench.configure(
        blocks=block(),
        max_train_steps=STEPS,
        checkpoint_step_interval=4,
        checkpoint_epoch_interval=1,
        checkpoints_total_limit=20,
        push_checkpoints_to_hub=True,
        **VALIDATION,
    )
    # Micro-batch 11 opens the third last window, of 3; the epoch's 12 micro-batches end inside it.
    run = workbench.train(probe=PROBE, env={"RAMP_PROBE": "manual=11,hub"})
    assert run.ok, run.explain()
    record = run.records[0]
    assert record["windows"] == [1, 1, 1, 1, 1, 1, 2, 2, 3, 4]
    assert all(fired["closed"] and fired["in_window"] == 0 for fired in record["fired"]), record["fired"]
    # Every fourth step, and once more at step 9 for the requests and for the epoch that ended in its window.
    checkpoints = [fired["step"] for fired in record["fired"] if fired["what"] == "checkpoint"]
    assert checkpoints == [4, 8, 9]
    validations = [fired["step"] for fired in record["fired"] if fired["what"] == "intermediary validation"]
    # 3.1 validates an epoch when the last target-sized share of its micro-batches begins: here with step 7.
    assert [step for step in validations if step != 7] == [4, 8, 9]
    # Each checkpoint is made at a window's end, so each is uploaded; stock's remainder would let step 8 and 9 slip.
    assert record["uploads"] == [[step, True] for step in checkpoints]


@pytest.mark.one_release("3.")
def test_a_ramp_down_reaches_max_train_steps(workbench):
    keys = {"initial_effective_batch_size": 12, "target_effective_batch_size": 2, "ramp_curve": "linear"}
    workbench.configure(blocks=block(**keys), max_train_steps=8)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    ramp = GH200GradientRamp(12, 2, 14, train_batch_size=2, curve="linear")
    assert run.records[0]["windows"] == [window.accumulation for window in ramp.windows(8)]
    assert "the effective batch shrinks over the run, from 12 to 2" in run.log()


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), pytest.param("sqrt", 0.5, marks=pytest.mark.matrix)])
@pytest.mark.one_release("4.")
def test_the_rate_rule_scales_the_applied_rate(workbench, rule, power):
    workbench.configure(blocks=block(ramp_lr_rule=rule), max_train_steps=STEPS)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    record = run.records[0]
    expected = [1e-3 * (length / 4) ** power for length in record["windows"]]
    assert record["applied_rates"] == pytest.approx(expected)
    assert [row["learning_rate"] for row in record["logged"]] == pytest.approx(expected)


@OLDEST_ALONE
def test_a_run_by_epochs_has_as_many_steps_as_its_data_have_windows(workbench, world):
    """24 images are 12 micro-batches, twice; what SimpleTuner shows and the rate's schedule speak of the same steps."""
    ramp = block(world)["gh200_optimizations"]
    del ramp["batch_rampup_steps"]
    length = {"max_train_steps": 0, "num_train_epochs": 2}
    workbench.configure(blocks={"gh200_optimizations": ramp}, **length, lr_scheduler="polynomial", lr_warmup_steps=0)
    run = workbench.train(world=world, probe=PROBE)
    assert run.ok, run.explain()
    each = 24 // world
    expected = GH200GradientRamp(2 * world, 8 * world, each // 10, train_batch_size=2, world_size=world)
    steps = whole_windows(expected, each)
    for record, summary in zip(run.records, run.summaries, strict=True):
        assert record["windows"] == [window.accumulation for window in expected.windows(steps)]
        assert each - 4 < sum(record["windows"]) <= each
        assert (summary["global_step"], summary["max_train_steps"], summary["status"]) == (steps, steps, "completed")
    rates = [row["learning_rate"] for row in run.records[0]["logged"]]
    assert rates[0] > rates[-1] == pytest.approx(min(rates)), "the rate falls to its end"
    assert f"{each} micro-batches per rank are {steps} optimizer steps" in run.log()
    assert "num_train_epochs 2 says how long the run is" in run.log()
