"""The effective batch on SimpleTuner's progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from simpletuner_gh200.ramp.schedule import Window


def show_on_bar(trainer: Any) -> Callable[[Window], None]:
    """A listener that keeps ``batch=N`` in the postfix of the training bar; quiet where there is no bar."""
    shown: dict[str, int] = {}

    def listen(window: Window) -> None:
        if not shown:
            _extend_postfix(_training_bar(trainer), shown)
        shown["batch"] = window.effective

    return listen


def _training_bar(trainer: Any) -> Any | None:
    # The bar is a local of upstream's loop; tqdm itself keeps track of those that are open.
    kind = getattr(sys.modules.get(type(trainer).__module__), "tqdm", None)
    bars = [bar for bar in getattr(kind, "_instances", ()) if str(getattr(bar, "desc", "")).startswith("Epoch")]
    return bars[0] if len(bars) == 1 else None


def _extend_postfix(bar: Any | None, shown: dict[str, int]) -> None:
    if bar is None:
        return
    original = bar.set_postfix

    def set_postfix(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, **shown})

    bar.set_postfix = set_postfix
