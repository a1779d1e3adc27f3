"""What a check of the self-test is given to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from simpletuner_gh200.diagnostics.check import Check, Failed, passed
from simpletuner_gh200.diagnostics.context import NothingToLookAt
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver


@dataclass
class Bench:
    """The device under test."""

    driver: Driver
    ordinal: int = 0
    emulated: bool = False
    """Speed means nothing there, and kernels don't run."""
    measured: dict[str, float] = field(default_factory=dict)
    """Numbers for the report, by name."""

    @cached_property
    def caps(self) -> Capabilities:
        return self.driver.capabilities(self.ordinal)

    def need(self, having: bool, what: str) -> None:
        """Skip the check unless ``having``."""
        if not having:
            raise NothingToLookAt(what)

    def need_device(self) -> None:
        self.need(self.caps.mode != "none", f"no CUDA device: {self.caps.absence}")


def self_check(name: str, what: str, look: Callable[[Bench], str]) -> Check:
    """``name``: ``group.what``, stable: people send reports by these names. ``look`` returns what was found."""
    return Check(name, what, "", lambda bench: passed(look(bench)))


def expect(holds: bool, found: str) -> None:
    """A check's assertion, which stays in optimized runs."""
    if not holds:
        raise Failed(found)
