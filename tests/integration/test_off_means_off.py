"""With no block set, a run under the extension is stock SimpleTuner's, to the bit."""

from __future__ import annotations

import json

import pytest
import torch


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_stock(workbench, world):
    stock = workbench.train(stock=True, world=world)
    assert stock.ok, stock.explain()
    weights = stock.lora()
    workbench.restore()
    workbench.configure()
    ours = workbench.train(world=world)
    assert ours.ok, ours.explain()
    assert len(ours.losses[0]) == 8
    assert ours.losses == stock.losses
    assert same_tensors(ours.lora(), weights)


def test_every_seam_is_installed(workbench):
    run = workbench.train()
    assert run.ok, run.explain()
    assert set(run.summaries[0]["seams"].values()) == {"ok"}


def test_the_output_folder_holds_nothing_of_ours(workbench):
    stock = workbench.train(stock=True)
    names = {path.relative_to(stock.output) for path in stock.output.rglob("*")}
    written = json.loads((stock.output / "simpletuner_config.json").read_text())
    workbench.restore()
    workbench.configure()
    ours = workbench.train()
    assert {path.relative_to(ours.output) for path in ours.output.rglob("*")} == names
    assert json.loads((ours.output / "simpletuner_config.json").read_text()) == written
