"""In-memory datasets in real SimpleTuner: same losses, same caches, one copy for all ranks, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

PROBE = Path(__file__).with_name("probe_store_reads.py")


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_local_files(workbench, world):
    stock = workbench.train(stock=True, world=world)
    assert stock.ok, stock.explain()
    weights = stock.lora()
    workbench.restore()
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"compression": "auto"}})
    ours = workbench.train(world=world)
    assert ours.ok, ours.explain()
    assert ours.losses == stock.losses
    assert same_tensors(ours.lora(), weights)
    staged = ours.summaries[0]["details"]["store"]["tiny-images"]
    assert staged["staged"] == 48, "images and captions"
    for summary in ours.summaries:
        assert summary["details"]["store"]["tiny-images"]["files"] == 48, "every rank serves the same memory"
