"""Keep, offload or recompute: what is free of cost first, then what costs least."""

from __future__ import annotations

import pytest

from simpletuner_gh200.model.activations.policy import Block, Rates, choose
from simpletuner_gh200.units import GIB

LINK = Rates(d2h=100.0, h2d=200.0, work=1.0)
"""100 bytes a second out, 200 back; work in seconds."""


def blocks(count: int, *, saved: int = 100, seconds: float = 2.0, inputs: int = 10) -> list[Block]:
    return [Block(saved, seconds, inputs) for _ in range(count)]


def test_what_fits_stays() -> None:
    mix = choose(blocks(4), hbm_room=400, grace_limit=10_000, rates=LINK)
    assert mix.choices == ("keep",) * 4
    assert (mix.kept, mix.offloaded, mix.exposed_seconds, mix.fits) == (400, 0, 0, True)


def test_the_first_blocks_leave_and_no_more_than_must() -> None:
    mix = choose(blocks(6), hbm_room=350, grace_limit=10_000, rates=LINK)
    assert mix.choices == ("offload", "offload", "offload", "keep", "keep", "keep")
    assert mix.exposed_seconds == mix.recompute_seconds == 0
    assert "hidden" in mix.why


def test_the_last_block_can_not_be_hidden() -> None:
    """Its copy would only begin when the forward pass ends, and it is the first to be asked for."""
    mix = choose(blocks(3), hbm_room=0, grace_limit=10_000, rates=LINK)
    assert mix.choices[:2] == ("offload", "offload")
    assert mix.exposed_seconds + mix.recompute_seconds > 0


def test_half_the_rate_to_grace_halves_what_is_hidden() -> None:
    """As on nodes with four GH200: what the link can't take in time is computed again, where that is cheaper."""
    fast = choose(blocks(10, seconds=0.5), hbm_room=0, grace_limit=10_000, rates=Rates(200.0, 400.0))
    slow = choose(blocks(10, seconds=0.5), hbm_room=0, grace_limit=10_000, rates=Rates(100.0, 400.0))
    assert fast.counts()["offload"] == 9
    assert slow.counts() == {"keep": 0, "offload": 4, "recompute": 6}


def test_grace_is_never_exceeded() -> None:
    mix = choose(blocks(10), hbm_room=100, grace_limit=250, rates=LINK)
    assert mix.offloaded == 200
    assert mix.counts()["recompute"] >= 7
    assert mix.kept <= 100


def test_waiting_for_the_link_may_cost_less_than_computing_again() -> None:
    dear = [Block(100, 50.0, 10), Block(100, 0.001, 10)]
    mix = choose(dear, hbm_room=0, grace_limit=10_000, rates=Rates(d2h=10.0, h2d=10.0))
    assert mix.choices[0] == "offload"
    assert mix.exposed_seconds == pytest.approx(20.0)
    assert mix.choices[1] == "recompute"


def test_what_can_not_be_recomputed_is_waited_for_or_stays() -> None:
    fixed = [Block(100, 0.0, recomputable=False), Block(100, 0.0, recomputable=False)]
    mix = choose(fixed, hbm_room=0, grace_limit=100, rates=LINK)
    assert mix.choices == ("offload", "keep")
    assert not mix.fits
    assert "too much" in mix.why


def test_without_a_link_to_wait_for_only_grace_limits() -> None:
    mix = choose(blocks(5), hbm_room=0, grace_limit=300, rates=None)
    assert mix.choices == ("offload", "offload", "offload", "recompute", "recompute")


def test_flux_in_full_on_a_96_gb_device() -> None:
    """48.9 GiB saved by 57 blocks and 41.5 of HBM for them: 7.4 GiB leave, hidden, and nothing is computed again."""
    model = [Block(int(48.9 * GIB / 57), 1.7e12, 32 << 20) for _ in range(57)]
    for d2h in (290e9, 150e9):
        mix = choose(model, hbm_room=int(41.5 * GIB), grace_limit=200 * GIB, rates=Rates(d2h, 370e9, work=400e12))
        assert mix.counts()["recompute"] == 0
        assert mix.exposed_seconds == 0
        assert 7 * GIB < mix.offloaded < 9 * GIB
