"""A benchmark suite: a name and a function that measures and returns JSON-ready numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Suite:
    """Exported as ``SUITE`` by one file in ``bench/suites``; ``gh200 bench NAME`` runs it.

    ``measure(quick)`` returns a nested dict with exactly the keys contracts.md names (more are welcome). ``quick``
    asks for sizes small enough for a test that only looks at the shape of the result.
    """

    name: str
    help: str
    measure: Callable[[bool], dict[str, Any]]
