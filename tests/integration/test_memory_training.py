"""Hints and oversubscription in real SimpleTuner: they run at their moments, record what they did, change no number."""

from __future__ import annotations


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


def test_optimizer_state_and_ema_go_to_the_pool(workbench):
    stock = workbench.known(stock=True)
    assert stock.ok, stock.explain()
    block = {"use_uvm": True, "uvm_access_pattern": "cpu_first"}
    workbench.configure(blocks={"gh200_optimizations": block}, use_ema=True)
    run = workbench.train()
    assert run.ok, run.explain()
    assert run.losses == stock.losses
    pool = run.summaries[0]["details"]["oversubscription"]
    assert pool["pool"] == "RecordingPool"
    assert pool["pattern"] == "cpu_first"
    lora = sum(tensor.numel() * 4 for tensor in run.lora().values())
    assert pool["bytes"]["optimizer"] >= 2 * lora, "two moments for each trained weight"
    assert pool["bytes"]["ema"] >= lora
    assert pool["state"]["held"] == sum(pool["bytes"].values())
