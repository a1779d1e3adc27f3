"""Finding definitions, parameters and dotted names in source."""

from __future__ import annotations

import ast
import inspect

import pytest

from simpletuner_gh200.upstream import syntax


def test_last_definition_wins_wherever_it_stands() -> None:
    module = ast.parse("def f(a): ...\nif True:\n    def f(b): ...\ntry:\n    x = 1\nexcept ImportError:\n    x = 2\n")
    found = syntax.find(module, "f")
    assert isinstance(found, syntax.Function)
    assert syntax.parameters(found) == ("b",)
    assert ast.unparse(syntax.value_of(syntax.find(module, "x"))) == "2"  # type: ignore[arg-type]


def test_a_nested_function_is_not_a_definition_of_the_module() -> None:
    assert syntax.find(ast.parse("def outer():\n    def inner(): ...\n"), "outer.inner") is None


@pytest.mark.parametrize("text", ["a, /, b, *c, d, **e", "self, x=1, *, y", "*args, **kwargs", ""])
def test_parameters_are_those_inspect_sees(text: str) -> None:
    source = f"def f({text}): ...\n"
    namespace: dict[str, object] = {}
    exec(source, namespace)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(namespace["f"])  # type: ignore[arg-type]
    seen = tuple(stars.get(value.kind, "") + name for name, value in signature.parameters.items())
    found = syntax.find(ast.parse(source), "f")
    assert isinstance(found, syntax.Function)
    assert syntax.parameters(found) == seen


def test_assignments_see_through_tuples_and_augmented_ones() -> None:
    module = ast.parse("a, (self.b, c) = 1, (2, 3)\nself.b += 1\nself.b: int = 2\nother.b = 3\n")
    assert len(syntax.assignments(module, "self.b")) == 3


def test_mentions_need_the_whole_dotted_name() -> None:
    module = ast.parse("self.config.steps\nconfig.steps\nself.steps\n")
    assert len(syntax.mentions(module, "self.config.steps")) == 1
