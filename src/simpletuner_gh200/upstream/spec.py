"""The shape of the contract: a place in SimpleTuner, its signature, and the facts we rely on there.

Nothing here imports SimpleTuner or torch. The static check reads these against source text; the seams read the
same specs at run time before they wrap anything, so that the two can't disagree about what is expected.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from simpletuner_gh200.registry import contributions


@dataclass(frozen=True)
class Fact:
    """Something about upstream's source that we rely on beyond a signature.

    ``holds`` gets the parsed module of the spec and returns None, or what it found instead.
    """

    name: str
    reason: str
    holds: Callable[[ast.Module], str | None]
    features: tuple[str, ...] | None = None
    """Features that are off without it; None: those of the seam it belongs to."""


@dataclass(frozen=True)
class SeamSpec:
    """One place where we meet upstream."""

    name: str
    module: str
    """Dotted module, ``simpletuner.helpers.training.trainer``; accelerate's own modules are allowed too."""
    qualname: str
    """``Trainer.prepare_batch`` or a module-level name."""
    parameters: tuple[str, ...] | None
    """Parameter names in order, ``*args``/``**kwargs`` with their stars; None where it is not callable."""
    features: tuple[str, ...]
    """Features that are off without it; ``core`` is needed by everything."""
    reason: str
    facts: tuple[Fact, ...] = ()
    optional: bool = False
    """Absence is fine: the features live without it (a helper of newer releases, say)."""


def all_specs() -> dict[str, SeamSpec]:
    found = contributions("simpletuner_gh200.upstream.contract", "SPECS", SeamSpec)
    return {spec.name: spec for spec in found}


def signature_text(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
