"""The one exception tree of the package.

GH200Error                     anything we raise on purpose; carries a remedy and an exit code
├── ConfigError                a setting is wrong (exit 2); holds every problem that was found
├── UsageError                 the command line or the machine lacks something (exit 2)
├── FeatureUnavailable         something asked for explicitly cannot be had (exit 2)
│   └── SeamMismatch           this SimpleTuner does not have the place we hook, as we know it
├── RunFailed                  a run or a check ended badly (exit 1)
├── OwnershipError             a patched attribute is not ours to restore (exit 1)
├── MemoryRoomError            the memory room (exit 1)
│   ├── DriverError            a CUDA driver call failed: call, code, remedy
│   └── SharingError           the ranks of a node could not meet or share
├── StoreError                 the in-memory dataset (exit 1)
│   ├── DatasetTooLarge        over the ceiling: needed, allowed, what would fit
│   └── DatasetCorrupt         more broken files than allowed
└── CacheError                 the unified caches (exit 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class GH200Error(Exception):
    """Base of everything the extension raises on purpose.

    ``remedy`` is one sentence telling the reader what to do about it; ``exit_code`` is what the
    command line returns.
    """

    exit_code = 1
    document: Mapping[str, object] = {}
    """What ``--json`` says of it besides message and exit code."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where, what was found, what is accepted."""

    where: str
    message: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.remedy})" if self.remedy else "")


class ConfigError(GH200Error):
    """Every configuration problem found in one go."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, source: str | None = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        heading = f"{count} configuration problem{'s' if count != 1 else ''}" + (f" in {source}" if source else "")
        super().__init__(heading + "\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class UsageError(GH200Error):
    """The command line, or the machine it runs on, lacks something it needs."""

    exit_code = 2


class FeatureUnavailable(GH200Error):
    """A feature that was asked for explicitly cannot be provided here."""

    exit_code = 2


class SeamMismatch(FeatureUnavailable):
    """SimpleTuner's code at one of our seams is not what we know how to wrap."""

    def __init__(self, seam: str, *, found: str, expected: str, remedy: str | None = None) -> None:
        super().__init__(
            f"seam '{seam}' does not match this SimpleTuner: found {found}; expected {expected}", remedy=remedy
        )


class RunFailed(GH200Error):
    """A training run or a check ended without what it promised."""


class OwnershipError(GH200Error):
    """Someone else replaced an attribute after us, so restoring it would destroy their change."""


class MemoryRoomError(GH200Error):
    """The memory room could not do what was asked."""


class DriverError(MemoryRoomError):
    """A driver call returned an error status."""

    def __init__(self, call: str, code: int, name: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{call} failed with {name} ({code})", remedy=remedy)
        self.call = call
        self.code = code
        self.name = name


class SharingError(MemoryRoomError):
    """The ranks of one node could not find each other, or one of them ended before it shared what others need."""


class StoreError(GH200Error):
    """The in-memory dataset could not be staged or served."""


class DatasetTooLarge(StoreError):
    """Staging would hold more than it may; nothing stays allocated."""

    def __init__(self, message: str, *, needed: int, allowed: int, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.needed = needed
        self.allowed = allowed
        self.document = {"fits": False, "needed": needed, "allowed": allowed, "error": str(self)}


class DatasetCorrupt(StoreError):
    """More files are broken than ``max_corruption_rate`` allows; ``report`` is JSON-ready and names them."""

    def __init__(self, message: str, *, report: Mapping[str, object], remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.report = report


class CacheError(GH200Error):
    """The unified cache could not be filled, written or served."""
