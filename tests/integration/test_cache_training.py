"""Unified caches in real SimpleTuner: hits come from slabs, and no number changes."""

from __future__ import annotations

import pytest
import torch

UNIFIED = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}}


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def cache_reports(run):
    return [summary["details"]["caches"] for summary in run.summaries]


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_those_of_plain_caches(workbench, world):
    stock = workbench.train(stock=True, world=world)
    assert stock.ok, stock.explain()
    weights = stock.lora()
    workbench.restore()
    workbench.configure(blocks=UNIFIED)
    ours = workbench.train(world=world)
    assert ours.ok, ours.explain()
    assert ours.losses == stock.losses
    assert same_tensors(ours.lora(), weights)
    for report in cache_reports(ours):
        for found in report.values():
            assert found["hits"] > 0, report
            assert found["misses"] == 0, report
            assert found["fallbacks"] == {}, report
        assert sum(found["batched"] for found in report.values()) > 0, "latents went straight into batches"
