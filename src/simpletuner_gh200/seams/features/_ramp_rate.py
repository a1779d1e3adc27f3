"""The learning rate tied to the batch, applied around the optimizer's step only.

Schedulers never see the changed rate: some compute the next rate from the present one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.seams.features._ramp_wraps import Wraps


class RateRule:
    """Multiplies the rate of every parameter group by ``factor()`` while the optimizer steps."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._wraps = Wraps()

    def install(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            if optimizer is None:
                continue
            if any("lr" not in group for group in optimizer.param_groups):
                raise FeatureUnavailable(
                    f"ramp_lr_rule: {type(optimizer).__name__} has parameter groups without a learning rate",
                    remedy='set "ramp_lr_rule": "none", or use another optimizer',
                )
            self._wraps.put(optimizer, "step", self._around(optimizer, optimizer.step))

    def uninstall(self) -> None:
        self._wraps.remove()

    def _around(self, optimizer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._wraps.active:
                return original(*args, **kwargs)
            groups = optimizer.param_groups
            rates = [group["lr"] for group in groups]
            factor = self._factor()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            try:
                return original(*args, **kwargs)
            finally:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

        return step
