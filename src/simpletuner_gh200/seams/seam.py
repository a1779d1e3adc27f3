"""A seam: one place of the contract, wrapped. It verifies first, then installs, and can be taken out again."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.errors import SeamMismatch
from simpletuner_gh200.registry import contributions
from simpletuner_gh200.seams.patch import Patch, Patches, wrap_method
from simpletuner_gh200.upstream.features import ON, Status
from simpletuner_gh200.upstream.spec import SeamSpec, all_specs, signature_text

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")

WAITING = Status("its module was not imported")


@dataclass(frozen=True)
class Seam:
    """One of the ``SEAMS`` of a file in ``seams/points``; ``name`` is that of its ``SeamSpec``."""

    name: str
    patches: Callable[[ModuleType, Runtime], Sequence[Patch]]
    """Given the imported module, what to replace there."""
    own_spec: SeamSpec | None = None
    """For a place outside SimpleTuner's contract (torch's own)."""

    @property
    def spec(self) -> SeamSpec:
        return self.own_spec or all_specs()[self.name]


Around = Callable[["Runtime", Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(runtime, wrapped, instance, args, kwargs) -> result: called instead of what is at a place."""


def wrapping(name: str, around: Around) -> Seam:
    """A seam that does no more than to call ``around`` instead of the function or method at its place."""

    def patches(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
        owner, _, attribute = all_specs()[name].qualname.rpartition(".")

        def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return around(runtime, wrapped, instance, args, kwargs)

        return [wrap_method(getattr(module, owner) if owner else module, attribute, call)]

    return Seam(name, patches)


def all_seams() -> tuple[Seam, ...]:
    return tuple(contributions("simpletuner_gh200.seams.points", "SEAMS", Seam))


class InstalledSeam:
    """A seam in this process: its state, and the patches to take out again."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self.spec = seam.spec
        self.status = WAITING
        self._patches = Patches()

    @property
    def ok(self) -> bool:
        return self.status.on

    def install(self, module: ModuleType, runtime: Runtime) -> None:
        """Verify, then patch all or nothing. A mismatch is remembered, not raised: who needs the seam decides."""
        try:
            verify(self.spec, module)
        except SeamMismatch as mismatch:
            self.status = Status("not in this SimpleTuner" if self.spec.optional else mismatch.message)
            if not self.spec.optional:
                logger.warning("gh200: %s", mismatch.message)
            return
        try:
            patches = list(self.seam.patches(module, runtime))
        except (AttributeError, TypeError, KeyError) as missing:
            # Something beside the seam is gone; an exception here would break SimpleTuner's own import.
            self.status = Status(f"{type(missing).__name__}: {missing}")
            logger.warning("gh200: seam '%s' is %s", self.spec.name, self.status)
            return
        self._patches.install(*patches)
        self.status = ON

    def uninstall(self) -> None:
        self.status = Status("uninstalled")
        self._patches.uninstall()


def verify(spec: SeamSpec, module: ModuleType) -> Any:
    """The object at the seam, if it is there and takes the parameters we know; SeamMismatch otherwise."""
    try:
        target = attrgetter(spec.qualname)(module)
        found = spec.qualname + (signature_text(parameter_names(target)) if spec.parameters is not None else "")
    except AttributeError:
        found = f"no {spec.qualname} in {spec.module}"
    except (TypeError, ValueError):
        found = f"{spec.qualname} that is not callable"
    if found != spec.expected:
        raise SeamMismatch(spec.name, found=found, expected=spec.expected)
    return target


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)
    return tuple(stars.get(value.kind, "") + name for name, value in signature.parameters.items())
