"""With no block set, a run under the extension is stock SimpleTuner's, to the bit."""

from __future__ import annotations

import json

import pytest

from simpletuner_gh200.upstream.spec import all_specs
from tests.integration.workbench import RANKS


@pytest.mark.parametrize("world", RANKS)
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
    seams = run.summaries[0]["seams"]
    of_pages = {name for name, spec in all_specs().items() if spec.features == ("web_ui",)}
    assert {seams[name] for name in seams.keys() - of_pages} == {"ok"}
    loaded = {seams[name] for name in seams.keys() & of_pages}
    assert loaded <= {"ok", "off: its module was not imported"}, "a run without the Web UI loads nothing for its pages"


def test_the_output_folder_holds_nothing_of_ours(workbench):
    stock = workbench.known(stock=True)
    names = {path.relative_to(stock.output) for path in stock.output.rglob("*")}
    written = json.loads((stock.output / "simpletuner_config.json").read_text())
    ours = workbench.known()
    assert {path.relative_to(ours.output) for path in ours.output.rglob("*")} == names
    assert json.loads((ours.output / "simpletuner_config.json").read_text()) == written
