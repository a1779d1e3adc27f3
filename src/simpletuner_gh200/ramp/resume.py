"""What a checkpoint remembers of the ramp, and how a resumed run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from simpletuner_gh200.ramp.schedule import GH200GradientRamp, Origin

SETTINGS = ("initial", "target", "ramp_steps", "curve", "increment")
LAYOUT = ("train_batch_size", "world_size")


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


def resume(asked: GH200GradientRamp, saved: RampState | None, step: int) -> Resumption:
    """The schedule to follow from optimizer step ``step`` on.

    Unchanged settings on unchanged ranks give the very windows of an uninterrupted run. Otherwise the run goes on
    from the samples it has consumed: on other ranks along the same curve over samples, under other settings along
    theirs.
    """
    if step == 0:
        return Resumption(asked)
    if saved is None or saved.step != step:
        found = "no ramp state" if saved is None else f"the ramp state of optimizer step {saved.step}"
        return Resumption(asked, (f"the checkpoint has {found}: the ramp goes on as at step {step} of a new run",))
    changed = _differences(saved.ramp, asked)
    if not changed:
        return Resumption(replace(asked, origin=saved.ramp.origin, ramp_samples=saved.ramp.ramp_samples))
    length = saved.ramp.length if asked.ramp_steps == saved.ramp.ramp_steps else None
    ramp = replace(asked, origin=Origin(step, saved.samples), ramp_samples=length)
    notice = f"{', '.join(changed)} since the checkpoint: the ramp goes on from the {saved.samples} samples consumed"
    return Resumption(ramp, (notice,))


def _differences(saved: GH200GradientRamp, asked: GH200GradientRamp) -> list[str]:
    return [
        f"{name} changed from {getattr(saved, name)} to {getattr(asked, name)}"
        for name in (*SETTINGS, *LAYOUT)
        if getattr(saved, name) != getattr(asked, name)
    ]
