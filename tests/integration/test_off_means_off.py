"""With no block set, a run under the extension is stock SimpleTuner's, to the bit."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_stock(workbench, world):
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    ours = workbench.known(world=world)
    assert ours.ok, ours.explain()
    assert len(ours.losses[0]) == 8
    assert ours.losses == stock.losses
    assert ours.same_lora(stock)


def test_every_seam_is_installed(workbench):
    run = workbench.known()
    assert run.ok, run.explain()
    assert set(run.summaries[0]["seams"].values()) == {"ok"}


def test_the_output_folder_holds_nothing_of_ours(workbench):
    stock = workbench.known(stock=True)
    names = {path.relative_to(stock.output) for path in stock.output.rglob("*")}
    written = json.loads((stock.output / "simpletuner_config.json").read_text())
    ours = workbench.known()
    assert {path.relative_to(ours.output) for path in ours.output.rglob("*")} == names
    assert json.loads((ours.output / "simpletuner_config.json").read_text()) == written
