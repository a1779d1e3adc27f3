"""The start suite's parts run and give what the contract names; its runs are timed by SimpleTuner's own lines."""

from __future__ import annotations

import pytest

from simpletuner_gh200.bench.start_fill import KINDS, measure_fill, measure_packs, measure_scaling
from simpletuner_gh200.bench.start_runs import StartTimes
from simpletuner_gh200.bench.suite import Suite, find_suite
from simpletuner_gh200.bench.suites.start import _ratio, write_samples
from simpletuner_gh200.errors import UsageError


@pytest.mark.parametrize("kind", KINDS)
def test_filling(tmp_path, kind):
    found = measure_fill(tmp_path, kind, 4, 1)
    assert {"vs_limit", "held_vs_limit", "vs_torch_load", "us_per_entry"} <= found.keys()
    assert all(value > 0 for value in found.values())


def test_scaling_and_packs(tmp_path):
    assert measure_scaling(tmp_path / "scaling", 4, 1) > 0
    packs = measure_packs(tmp_path / "packs", 6, 1)
    assert packs["us_per_entry"] > 0
    assert packs["open_us_per_entry"] > 0


def test_ratios_are_between_neighbours():
    """A machine that is twice as slow in the second round slows both sides: the ratio is what it was."""
    stock = [StartTimes(1.0, 1.0, 4.0, 1.0), StartTimes(2.0, 2.0, 8.0, 1.0), StartTimes(1.0, 1.0, 4.0, 1.0)]
    ours = [StartTimes(0.5, 0.1, 2.0, 1.0), StartTimes(1.0, 0.2, 4.0, 1.0), StartTimes(0.5, 0.1, 2.0, 1.0)]
    assert _ratio(ours, stock, "data") == _ratio(ours, stock, "first_step") == 0.5
    assert _ratio(ours, stock, "captions") == pytest.approx(0.1)


def test_samples_are_images_with_captions_of_their_own(tmp_path):
    write_samples(tmp_path / "images", 3)
    captions = {path.read_text() for path in (tmp_path / "images").glob("*.txt")}
    assert len(captions) == len(list((tmp_path / "images").glob("*.png"))) == 3


def test_samples_can_be_asked_of_the_suite_that_has_them():
    assert find_suite("start").measure_samples is not None
    plain = Suite("plain", "", lambda quick: {"quick": quick})
    assert plain.run(True, None) == {"quick": True}
    with pytest.raises(UsageError, match="no --samples"):
        plain.run(True, 5)
