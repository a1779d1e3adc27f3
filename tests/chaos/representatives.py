"""Of many cases of one trial, which ones `make test` runs; the others belong to `make chaos`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def phases(*before: str) -> list[Any]:
    """``training``, where SimpleTuner's releases differ in how they end; ``before`` it one release stands for all."""
    return [*(pytest.param(phase, marks=pytest.mark.only_release("4.")) for phase in before), "training"]


def only(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``, all but those of ``kept`` marked ``chaos``."""
    few = list(kept)
    return [case if case in few else pytest.param(case, marks=pytest.mark.chaos) for case in cases]
