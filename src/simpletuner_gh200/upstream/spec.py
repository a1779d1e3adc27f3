"""The shape of the contract: a place in SimpleTuner, its signature, and the facts we rely on there.

Nothing here imports SimpleTuner or torch. The static check reads these against source text; the seams read the
same specs at run time before they wrap anything, so that the two can't disagree about what is expected.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from simpletuner_gh200.upstream import patterns, syntax

_INSIDE = "in "
_MODULE = "<module>"


@dataclass(frozen=True)
class Fact:
    """Something about upstream's source that we rely on beyond a signature."""

    name: str
    statements: tuple[str, ...]
    """In the words of ``patterns``."""
    within: str | None = None
    """The definition that they are about, or ``<module>`` for all of it; None: the seam's own."""
    features: tuple[str, ...] | None = None
    """Features that are off without it; None: those of the seam it belongs to."""

    def trouble(self, tree: ast.Module, own: str) -> str | None:
        """None when it holds, else what was found; ``own`` is the seam's qualified name."""
        where = self.within or own
        scope = tree if where == _MODULE else syntax.find(tree, where)
        if scope is None:
            return f"no {where}"
        found = (patterns.trouble(statement, scope) for statement in self.statements)
        return next((f"{trouble} in {where}" for trouble in found if trouble is not None), None)


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


def seam(name: str, *, module: str, place: str, need: str, optional: bool = False, **facts: Any) -> SeamSpec:
    """A table of a contract's file.

    ``place``: ``Owner.method(parameters)``, without parentheses where the parameters do not matter. ``need``: the
    features that are off without it, and what for: ``ramp, state: before it everything is prepared``.
    """
    qualname, parenthesis, inside = place.partition("(")
    parameters = _words(inside.removesuffix(")")) if parenthesis else None
    features, _, reason = need.rpartition(": ")
    found = tuple(_fact(need, text) for need, text in facts.items())
    return SeamSpec(name, module, qualname, parameters, _words(features), reason, found, optional)


def _fact(need: str, text: str | list[str]) -> Fact:
    """``need``: what has to be so, behind the features that are off without it where those are not the seam's."""
    features, _, name = need.rpartition(": ")
    statements = tuple(map(inspect.cleandoc, [text] if isinstance(text, str) else text))
    within = None
    if statements[0].startswith(_INSIDE):
        within, statements = statements[0].removeprefix(_INSIDE), statements[1:]
    return Fact(name, statements, within, _words(features) or None)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(", ")))


@cache
def all_specs() -> Mapping[str, SeamSpec]:
    """Of the files in ``contract``, one per area of SimpleTuner and one for accelerate."""
    folder = resources.files(__package__).joinpath("contract")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    tables = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    return {name: seam(name, **given) for table in tables for name, given in table.items()}


def signature_text(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
