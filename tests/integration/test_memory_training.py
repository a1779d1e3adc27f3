"""Hints in real SimpleTuner: they run at their moments, record what they did, change no number."""

from __future__ import annotations

import pytest


@pytest.mark.one_release("4.")
def test_hints_run_after_prepare_batch_and_change_nothing(workbench):
    stock = workbench.known(stock=True)
    assert stock.ok, stock.explain()
    workbench.configure(blocks={"gh200_optimizations": {"enable_uvm_hints": True}})
    run = workbench.train()
    assert run.ok, run.explain()
    assert run.losses == stock.losses
    hints = run.summaries[0]["details"]["hints"]
    assert hints["driver"] == "null"
    assert hints["batches"] == len(run.losses[0])
    assert 1 <= hints["looked_at"] <= 3, "batches that can't be helped are soon left alone"
    assert hints["tensors_helped"] == 0
    assert hints["tensors_not_helped"] >= 2, "latents and embeds of the batch were found"
    assert all("no CUDA device" in why for why in hints["why_not"])
