"""A ramped window's gradient is that of one large batch of the same samples, in a real run."""

from __future__ import annotations

from tests.integration.workbench import OLDEST_ALONE, probe, ramp

PROBE = probe("ramp_gradients")


@OLDEST_ALONE
def test_a_window_is_one_large_batch(workbench, world):
    # Clipping would change what the optimizer gets, and dropout what a second evaluation finds.
    blocks = {"gh200_optimizations": ramp(2 * world, 8 * world, 4, ramp_curve="linear")}
    workbench.configure(blocks=blocks, max_train_steps=4, max_grad_norm=0, lora_dropout=0)
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
