"""The shape of the contract: a place in SimpleTuner, its signature, and the facts we rely on there.

Nothing here imports SimpleTuner or torch. The static check reads these against source text; the seams read the
same specs at run time before they wrap anything, so that the two can't disagree about what is expected.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from simpletuner_gh200.registry import contributions
from simpletuner_gh200.upstream import syntax

Question = Callable[[ast.AST], str | None]
"""Asked of one definition. Answers None where all is as expected, else what was found instead, in words."""

MODULE = "<module>"


@dataclass(frozen=True)
class Fact:
    """Something about upstream's source that we rely on beyond a signature."""

    name: str
    question: Question
    within: str | None = None
    """The definition that is asked about, or ``MODULE`` for all of it; None: the seam's own."""
    features: tuple[str, ...] | None = None
    """Features that are off without it; None: those of the seam it belongs to."""

    def trouble(self, tree: ast.Module, own: str) -> str | None:
        """None when it holds, else what was found; ``own`` is the seam's qualified name."""
        where = self.within or own
        scope = tree if where == MODULE else syntax.find(tree, where)
        if scope is None:
            return f"no {where}"
        found = self.question(scope)
        return found if found is None or where == MODULE else f"{found} in {where}"


@dataclass(frozen=True)
class SeamSpec:
    """One place where we meet upstream."""

    name: str
    module: str
    """Dotted module, ``simpletuner.helpers.training.trainer``; accelerate's own modules are allowed too."""
    qualname: str
    """``Trainer.prepare_batch`` or a module-level name."""
    parameters: tuple[str, ...] | None
    """Parameter names in order, ``*args``/``**kwargs`` with their stars; None where they do not matter."""
    features: tuple[str, ...]
    """Features that are off without it; ``core`` is needed by everything."""
    reason: str
    facts: tuple[Fact, ...] = ()
    optional: bool = False
    """Absence is fine: the features live without it (a helper of newer releases, say)."""

    @property
    def expected(self) -> str:
        return self.qualname + (signature_text(self.parameters) if self.parameters is not None else "")


def seam(name: str, place: str, need: str, *facts: Fact, optional: bool = False) -> SeamSpec:
    """``place``: ``module:Owner.method(parameters)``, without parentheses where the parameters do not matter.

    ``need``: the features that are off without it, and what for: ``ramp, state: before it everything is prepared``.
    """
    module, _, definition = place.partition(":")
    qualname, parameters = parse_signature(definition)
    features, _, reason = need.rpartition(": ")
    return SeamSpec(name, module, qualname, parameters, _words(features), reason, facts, optional)


def fact(need: str, question: Question, within: str | None = None) -> Fact:
    """``need``: what has to be so, behind the features that are off without it where those are not the seam's."""
    features, _, name = need.rpartition(": ")
    return Fact(name, question, within, _words(features) or None)


def parse_signature(text: str) -> tuple[str, tuple[str, ...] | None]:
    qualname, parenthesis, inside = text.partition("(")
    return qualname, _words(inside.removesuffix(")")) if parenthesis else None


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(", ")))


def all_specs() -> dict[str, SeamSpec]:
    found = contributions("simpletuner_gh200.upstream.contract", "SPECS", SeamSpec)
    return {spec.name: spec for spec in found}


def signature_text(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
