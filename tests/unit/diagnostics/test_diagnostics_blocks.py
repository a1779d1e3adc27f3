"""Questions about weights in slots: what asks them runs here, too."""

from __future__ import annotations

import pytest
import torch

from simpletuner_gh200.diagnostics.selftest.blocks import QUESTIONS
from simpletuner_gh200.model.catching import HostPool


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (8, {"copies", "kernels", "together", "gb_each_way"}),
        (9, {"in_place", "brought", "there"}),
        (10, {"ahead", "late", "late_per_block"}),
    ],
)
def test_what_blocks_cost_is_measured_by_what_brings_them(number: int, told: set[str]) -> None:
    """Host memory on both sides: the mechanism, whose seconds say nothing of a link."""
    pool = HostPool(1 << 30)
    size = {"size": 1 << 16, "width": 32} if number == 8 else {"width": 32, "tokens": 8}
    found = QUESTIONS[number](torch.device("cpu"), pool, **size)
    assert found.keys() == told
    assert all(value > 0 for name, value in found.items() if name != "late_per_block")
    assert pool.state().peak >= (2 << 16 if number == 8 else 32 * 32 * 2), "what is far is in the pool"
