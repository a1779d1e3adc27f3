"""The shape of a selftest check, and what it is given to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from simpletuner_gh200.memory.driver.interface import Capabilities, Driver


class Failed(Exception):
    """The check found something else than it expected."""


class Skipped(Exception):
    """The check can't be made here; the message says why."""


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
            raise Skipped(what)

    def need_device(self) -> None:
        self.need(self.caps.mode != "none", f"no CUDA device: {self.caps.absence}")


@dataclass(frozen=True)
class SelfCheck:
    name: str
    """``group.what``, stable: people send reports by these names."""
    what: str
    run: Callable[[Bench], str]
    """Returns what was found; raises Failed or Skipped."""


def expect(holds: bool, found: str) -> None:
    """A check's assertion, which stays in optimized runs."""
    if not holds:
        raise Failed(found)
