"""Shapes of the ramp: the effective batch wanted after so many samples, in exact arithmetic.

Everything is rational, so that every rank, every machine and every Python gets the same window, ties included.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Literal, get_args

Curve = Literal["quadratic", "linear", "stepwise"]

CURVES: tuple[str, ...] = get_args(Curve)

Shape = Callable[[Fraction], Fraction]
"""Share of the way in samples, in [0, 1) -> share of the way from the initial to the target batch."""


def quadratic(share: Fraction) -> Fraction:
    return share * share


def linear(share: Fraction) -> Fraction:
    return share


def stepwise(distance: int, increment: int) -> Shape:
    """Equal stretches, each ``increment`` larger than the one before; the last step may be shorter."""
    stairs = -(-distance // increment)

    def shape(share: Fraction) -> Fraction:
        return Fraction(min(int(share * stairs) * increment, distance), distance)

    return shape


def effective(initial: int, target: int, share: Fraction, curve: Curve, increment: int | None = None) -> Fraction:
    """The effective batch at ``share`` of the ramp; the target from 1 on."""
    if share >= 1 or initial == target:
        return Fraction(target)
    if curve == "stepwise":
        assert increment is not None
        way = stepwise(abs(target - initial), increment)(share)
    else:
        way = quadratic(share) if curve == "quadratic" else linear(share)
    return initial + (target - initial) * way
