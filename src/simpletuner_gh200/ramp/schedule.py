"""The ramp as a pure function of the optimizer step.

A window is the micro-batches between two optimizer steps. Progress is what has been consumed when a window starts;
its accumulation is the effective batch wanted at that progress, in micro-batches, rounded and at least 1. Since each
window's length says where the next one starts, the whole schedule follows from its parameters alone: every rank
computes it for itself and a resumed run finds the same windows again. Everything is rational, so that every rank,
every machine and every Python gets the same window, ties included.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import sqrt
from typing import Any, Literal, get_args

from simpletuner_gh200.errors import ConfigError, Problem

Curve = Literal["quadratic", "linear", "stepwise"]

CURVES: tuple[str, ...] = get_args(Curve)

Rule = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True)
class Window:
    """One optimizer step's worth of micro-batches."""

    step: int
    """Optimizer steps done before it."""
    samples: int
    """Samples consumed before it, over all ranks."""
    accumulation: int
    """Micro-batches per rank in it."""
    effective: int
    """Samples in it, over all ranks."""


@dataclass(frozen=True)
class Origin:
    """Where the schedule starts counting: the beginning of the run, or the step at which a resume changed it."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class GH200GradientRamp:
    """Windows that lead from an ``initial`` to a ``target`` effective batch within ``ramp_steps`` micro-batches.

    ``initial`` and ``target`` count samples over all ranks, ``ramp_steps`` micro-batches per rank. ``ramp_samples``
    fixes the length in samples instead; it is set when a run is resumed on another number of ranks.
    """

    initial: int
    target: int
    ramp_steps: int
    train_batch_size: int = 1
    world_size: int = 1
    curve: Curve = "quadratic"
    increment: int | None = None
    origin: Origin = Origin()
    ramp_samples: int | None = None

    def __post_init__(self) -> None:
        optional = [name for name in ("increment", "ramp_samples") if getattr(self, name) is not None]
        problems = [
            Problem(name, f"{value!r} is not a whole number of at least 1")
            for name in ("initial", "target", "ramp_steps", "train_batch_size", "world_size", *optional)
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1
        ]
        if self.curve not in CURVES:
            problems.append(Problem("curve", f"{self.curve!r}: accepted: {', '.join(CURVES)}"))
        if self.curve == "stepwise" and self.increment is None:
            problems.append(Problem("increment", "needed when curve is 'stepwise', and not set"))
        if problems:
            raise ConfigError(problems, source="the ramp")

    @property
    def unit(self) -> int:
        """Samples of one micro-batch over all ranks: what effective sizes are multiples of."""
        return self.train_batch_size * self.world_size

    @property
    def length(self) -> int:
        """Samples after which the target is reached."""
        return self.ramp_samples if self.ramp_samples is not None else self.ramp_steps * self.unit

    def wanted(self, samples: int) -> Fraction:
        """The effective batch asked for after ``samples``, before it becomes whole micro-batches."""
        share = Fraction(samples, self.length)
        return effective(self.initial, self.target, share, self.curve, self.increment)

    def accumulation_after(self, samples: int) -> int:
        """Micro-batches per rank of a window that starts after ``samples``."""
        return max(1, round(self.wanted(samples) / self.unit))

    @property
    def target_accumulation(self) -> int:
        """Micro-batches per rank of every window once the ramp is over."""
        return self.accumulation_after(self.length)

    @cached_property
    def changes(self) -> tuple[Window, ...]:
        """The first window, and every later one whose accumulation differs from the one before it."""
        window = self._window(self.origin.step, self.origin.samples)
        found = [window]
        while window.accumulation != self.target_accumulation:
            ahead = self._windows_until_change(window)
            window = self._window(window.step + ahead, window.samples + ahead * window.effective)
            found.append(window)
        return tuple(found)

    def window(self, step: int) -> Window:
        """The window after ``step`` optimizer steps."""
        if step < self.origin.step:
            raise ValueError(f"optimizer step {step} lies before this schedule, which starts at {self.origin.step}")
        change = self.changes[bisect_right(self.changes, step, key=lambda found: found.step) - 1]
        return replace(change, step=step, samples=change.samples + (step - change.step) * change.effective)

    def accumulation(self, step: int) -> int:
        """Micro-batches per rank of the window after ``step`` optimizer steps."""
        return self.window(step).accumulation

    def windows(self, count: int | None = None) -> Iterator[Window]:
        """Every window from the origin on; the first ``count`` of them, or without end."""
        return (self.window(step) for step in itertools.islice(itertools.count(self.origin.step), count))

    def _window(self, step: int, samples: int) -> Window:
        accumulation = self.accumulation_after(samples)
        return Window(step, samples, accumulation, accumulation * self.unit)

    def _windows_until_change(self, window: Window) -> int:
        """How many windows like this one follow each other; found by halving, since the curve is monotone."""
        low, high = 0, -(-(self.length - window.samples) // window.effective)
        while high - low > 1:
            middle = (low + high) // 2
            same = self.accumulation_after(window.samples + middle * window.effective) == window.accumulation
            low, high = (middle, high) if same else (low, middle)
        return high


# -- shapes --------------------------------------------------------------------------------------------


def effective(initial: int, target: int, share: Fraction, curve: Curve, increment: int | None = None) -> Fraction:
    """The effective batch at ``share`` of the ramp; the target from 1 on."""
    if share >= 1 or initial == target:
        return Fraction(target)
    if curve == "stepwise":
        assert increment is not None
        way = _stairs(share, abs(target - initial), increment)
    else:
        way = share * share if curve == "quadratic" else share
    return initial + (target - initial) * way


def _stairs(share: Fraction, distance: int, increment: int) -> Fraction:
    """Equal stretches, each ``increment`` larger than the one before; the last step may be shorter."""
    stairs = -(-distance // increment)
    return Fraction(min(int(share * stairs) * increment, distance), distance)


# -- what follows the schedule -------------------------------------------------------------------------


def rate_factor(ramp: GH200GradientRamp, step: int, rule: Rule) -> float:
    """What the configured learning rate, meant for the target batch, is multiplied by.

    1 at the target batch; less before it, and more on the way down to it. ``linear`` keeps rate / batch constant, as
    one does for SGD (Goyal et al., arXiv 1706.02677). ``sqrt`` keeps rate / sqrt(batch) constant, which fits Adam and
    its relatives (Krizhevsky, arXiv 1404.5997; Malladi et al., arXiv 2205.10287). Neither is ever chosen for the user.
    """
    if rule == "none":
        return 1.0
    ratio = ramp.accumulation(step) / ramp.target_accumulation
    return ratio if rule == "linear" else sqrt(ratio)


def epoch_progress(epoch: int, consumed: int, batches_in: Callable[[int], int]) -> float:
    """Epochs completed after ``consumed`` micro-batches per rank, of which ``epoch`` (from 1 on) is the present one.

    They are measured in micro-batches, since an epoch has no fixed number of optimizer steps while the batch changes.
    ``batches_in`` tells an epoch's length. The present epoch counts for at most 1: it ends when its data do.
    """
    begun = sum(batches_in(earlier) for earlier in range(1, epoch))
    length = batches_in(epoch)
    share = (consumed - begun) / length if length else 0.0
    return epoch - 1 + min(max(share, 0.0), 1.0)


# -- across checkpoints --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RampState:
    """The ramp after ``step`` complete windows."""

    step: int
    samples: int
    accumulation: int
    """Of the window that was completed last; 0 before the first."""
    ramp: GH200GradientRamp

    @classmethod
    def after(cls, ramp: GH200GradientRamp, step: int) -> RampState:
        last = ramp.accumulation(step - 1) if step > ramp.origin.step else 0
        return cls(step, ramp.window(step).samples, last, ramp)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RampState:
        schedule = dict(raw["ramp"])
        ramp = GH200GradientRamp(**{**schedule, "origin": Origin(**schedule["origin"])})
        return cls(raw["step"], raw["samples"], raw["accumulation"], ramp)


@dataclass(frozen=True)
class Resumption:
    ramp: GH200GradientRamp
    notices: tuple[str, ...] = ()


def resume(requested: GH200GradientRamp, saved: RampState | None, step: int) -> Resumption:
    """The schedule to follow from optimizer step ``step`` on.

    Unchanged settings on unchanged ranks give the very windows of an uninterrupted run. Otherwise the run goes on
    from the samples it has consumed: on other ranks along the same curve over samples, under other settings along
    theirs.
    """
    if step == 0:
        return Resumption(requested)
    if saved is None or saved.step != step:
        found = "no ramp state" if saved is None else f"the ramp state of optimizer step {saved.step}"
        return Resumption(requested, (f"the checkpoint has {found}: the ramp goes on as at step {step} of a new run",))
    before = saved.ramp
    changed = [
        f"{name} changed from {getattr(before, name)} to {getattr(requested, name)}"
        for name in ("initial", "target", "ramp_steps", "curve", "increment", "train_batch_size", "world_size")
        if getattr(before, name) != getattr(requested, name)
    ]
    if not changed:
        return Resumption(replace(requested, origin=before.origin, ramp_samples=before.ramp_samples))
    length = before.length if requested.ramp_steps == before.ramp_steps else None
    ramp = replace(requested, origin=Origin(step, saved.samples), ramp_samples=length)
    notice = f"{', '.join(changed)} since the checkpoint: the ramp goes on from the {saved.samples} samples consumed"
    return Resumption(ramp, (notice,))
