"""The contract's language, true and untrue; the tables it is written in; and the syntax beneath."""

from __future__ import annotations

import ast

import pytest

from simpletuner_gh200.seams.seam import parameter_names
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.patterns import trouble
from simpletuner_gh200.upstream.spec import Fact, seam

TREE = ast.parse("""
class T:
    size: int = 1
    def __init__(self):
        self.type = "local"
    def train(self):
        with self.acc.accumulate(*models):
            loss = x / self.config.steps
        if step % self.config.steps == 0:
            self.save(step=1)
    async def save(self, step):
        try:
            warn(step)
            self.validate(step)
        except Exception as e:
            warn(e)
        a, (self.b, c) = 1, (2, 3)
        self.b += 1
        latent.to(other.shape)
table = {"local": A, "aws": B}
""")

TRUE = (
    "self.save; self.config.steps",
    "once self.save(_)",
    "self.acc.accumulate(...)",
    "with self.acc.accumulate(...): ...",
    "loss = x/self.config.steps",
    "all self.config.steps are\n    _ / self.config.steps\n    _ % self.config.steps",
    "self.b = _; c = _; a = _",
    "all self.b = _ are self.b += 1; self.b = (1, (2, 3))",
    "all self.type = _ are self.type = 'local'",
    "size: _",
    "def save(self, step): ...",
    "def save(*_): ...",
    "no def get_raw_config(*_): ...",
    "{'local': _, **_}",
    "no {'gcs': _, **_}",
    "all latent._ are latent.to",
    "try:\n    ...\n    self.validate(...)\nexcept Exception as e:\n    warn(_)",
)

UNTRUE = {
    "self.save; self.load": "no `self.load`",
    "config.steps": "no `config.steps`",
    "self.steps": "no `self.steps`",
    "once warn(...)": "2 `warn(...)`",
    "self.save(_, _)": "no `self.save(_, _)`",
    "self.save()": "no `self.save()`",
    "steps = _": "no `steps = _`",
    "all self.config.steps are _ / self.config.steps": "2 `self.config.steps`, 1 of them as `_ / self.config.steps`,",
    "all self.type = _ are self.type = 'aws'": "1 `self.type = _`, 0 of them as `self.type = 'aws'`,",
    "all self.kind are self.kind": "0 `self.kind`, 0 of them as `self.kind`,",
    "no def save(*_): ...": "1 `def save(*_): ...`",
    "weight: _": "no `weight: _`",
    "{'gcs': _, **_}": "no `{'gcs': _, **_}`",
    "{'local': _}": "no `{'local': _}`",
    "loss = x * self.config.steps": "no `loss = x * self.config.steps`",
    "all latent._ are latent.shape": "1 `latent._`, 0 of them as `latent.shape`,",
}


@pytest.mark.parametrize("statement", TRUE)
def test_true_statements_hold(statement: str) -> None:
    assert trouble(statement, TREE) is None


@pytest.mark.parametrize(("statement", "found"), UNTRUE.items(), ids=UNTRUE)
def test_untrue_statements_say_what_was_found(statement: str, found: str) -> None:
    assert trouble(statement, TREE) == found


def test_a_function_has_to_take_these_parameters() -> None:
    assert str(trouble("def save(self): ...", TREE)).startswith("no `def save(self):")


def test_a_fact_is_asked_where_it_says_and_names_that_place() -> None:
    assert Fact("x", ("self.save",), "T.train").trouble(TREE, "T") is None
    assert Fact("x", ("table = _",), "<module>").trouble(TREE, "T") is None
    assert Fact("x", ("self.save",)).trouble(TREE, "T.save") == "no `self.save` in T.save"
    assert Fact("x", ("self.save",), "T.walk").trouble(TREE, "T") == "no T.walk"


def test_a_table_is_a_place_with_its_facts() -> None:
    facts = {"it saves": "self.save(...)", "ramp: once": ["in T.train", "once _ / _", "no while _: ..."]}
    spec = seam("t.save", module="a.b", place="T.save(self, *rest)", need="ramp, state: so", optional=True, **facts)
    assert (spec.module, spec.qualname, spec.parameters) == ("a.b", "T.save", ("self", "*rest"))
    assert (spec.features, spec.reason, spec.optional) == (("ramp", "state"), "so", True)
    assert spec.facts == (
        Fact("it saves", ("self.save(...)",)),
        Fact("once", ("once _ / _", "no while _: ..."), "T.train", ("ramp",)),
    )
    assert seam("t", module="a", place="f()", need="ramp: why").parameters == ()
    assert seam("t", module="a", place="f", need="ramp: why").parameters is None


def test_last_definition_wins_wherever_it_stands() -> None:
    module = ast.parse(
        "def f(a): ...\nif True:\n    def f(b): ...\ntry:\n    x = 1\nexcept ImportError:\n    x, y = 2\n"
    )
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
    found = syntax.find(ast.parse(source), "f")
    assert isinstance(found, syntax.Function)
    assert syntax.parameters(found) == parameter_names(namespace["f"])  # type: ignore[arg-type]
