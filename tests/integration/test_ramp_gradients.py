"""A ramped window's gradient is that of one large batch of the same samples, in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.workbench import RANKS

PROBE = Path(__file__).with_name("probe_ramp_gradients.py")


def ramp(world: int) -> dict[str, object]:
    block = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 2 * world,
        "target_effective_batch_size": 8 * world,
        "batch_rampup_steps": 4,
        "ramp_curve": "linear",
    }
    return {"gh200_optimizations": block}


@pytest.mark.parametrize("world", RANKS)
def test_a_window_is_one_large_batch(workbench, world):
    # Clipping would change what the optimizer gets, and dropout what a second evaluation finds.
    workbench.configure(blocks=ramp(world), max_train_steps=4, max_grad_norm=0, lora_dropout=0)
    run = workbench.train(world=world, probe=PROBE, timeout=900)
    assert run.ok, run.explain()
    windows = run.records[0]["windows"]
    lengths = [window["length"] for window in windows]
    assert lengths == [1, 2, 3, 4]
    for window in windows:
        assert window["samples"] == window["length"] * 2 * world
        assert window["difference"] <= window["tolerance"]
        # In float64 both are the same number, as far below float32's rounding as float64 is.
        assert window["identity64"] <= window["tolerance"] * 2**-20
        # The tolerance is sharp: one micro-batch more or less, or a weight off by a thousandth, would be seen.
        assert window["tolerance"] < window["size"] / 1000
        if world == 1:
            assert window["same_bits"]
