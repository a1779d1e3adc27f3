"""Model state in Grace in real SimpleTuner: the same catching, with host memory standing in, and no number changed."""

from __future__ import annotations

import json

UVM = {"use_uvm": True, "uvm_min_tensor_kb": 0}


def state_of(run) -> dict:
    assert run.ok, run.explain()
    return run.summaries[0]["details"]["state"]


def test_optimizer_state_and_ema_of_a_lora_live_in_the_pool(workbench):
    workbench.configure(use_ema=True)
    stock = workbench.known(stock=True)
    assert stock.ok, stock.explain()
    workbench.configure(blocks={"gh200_optimizations": UVM}, use_ema=True)
    run = workbench.train()
    found = state_of(run)
    assert run.losses == stock.losses
    assert run.same_lora(stock)
    lora = sum(tensor.numel() * 4 for tensor in run.lora().values())
    assert found["tensors"] > 0
    assert found["bytes"] >= 3 * lora, "two moments for each trained weight, and its shadow"
    assert found["of"]["ema"]["bytes"] >= lora
    assert found["of"]["optimizer"]["bytes"] >= 2 * lora
    assert found["pool"]["held"] == found["bytes"], json.dumps(found)
    assert found["mechanism"] == "host memory standing in"
