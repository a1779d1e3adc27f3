"""The learning rate tied to the batch: what the configured rate, meant for the target batch, is multiplied by.

``linear`` keeps rate / batch constant, as one does for SGD (Goyal et al., arXiv 1706.02677). ``sqrt`` keeps
rate / sqrt(batch) constant, which fits Adam and its relatives (Krizhevsky, arXiv 1404.5997; Malladi et al.,
arXiv 2205.10287). Neither is ever chosen for the user.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

from simpletuner_gh200.ramp.schedule import GH200GradientRamp

Rule = Literal["none", "linear", "sqrt"]


def rate_factor(ramp: GH200GradientRamp, step: int, rule: Rule) -> float:
    """1 at the target batch; less before it, and more on the way down to it."""
    if rule == "none":
        return 1.0
    ratio = ramp.accumulation(step) / ramp.target_accumulation
    return ratio if rule == "linear" else sqrt(ratio)
