"""Each kind of fact, true and untrue; and the text in which a place is written."""

from __future__ import annotations

import ast

import pytest

from simpletuner_gh200.seams.seam import parameter_names
from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import MODULE, Fact, Question, seam

LOOP = """
class T:
    size: int = 1
    def __init__(self):
        self.type = "local"
    def train(self):
        with self.acc.accumulate(*models):
            loss = x / self.config.steps
        if step % self.config.steps == 0:
            self.save(1)
    def save(self, step):
        try:
            self.validate(step)
        except Exception as e:
            warn(e)
        self.send(event)
    def run(self):
        self.train()
table = {"local": A, "aws": B}
def make():
    mapping = {"local": A}
    return mapping
paint = {"colour": "red"}
"""
TREE = ast.parse(LOOP)
DIVIDED = (ast.Div, ast.Mod)

TRUE: dict[str, tuple[str, Question]] = {
    "calls": ("T.run", facts.calls("self.train", times=1, arguments=0)),
    "mentions": ("T", facts.mentions("self.train", "self.config.steps")),
    "exists": ("table", facts.exists),
    "assigns": ("T.__init__", facts.assigns("self.type")),
    "assigns constant": ("T.__init__", facts.assigns_constant("self.type", "local")),
    "methods": ("T", facts.methods("run(self)", "save(self, step)")),
    "lacks": ("T", facts.lacks("get_raw_config")),
    "declares": ("T", facts.declares("size")),
    "dict": ("table", facts.dict_display("local")),
    "dict inside": ("make", facts.dict_display("local", name="mapping")),
    "dict entry": (MODULE, facts.dict_entry("colour", "red")),
    "operand": ("T.train", facts.operand_only("self.config.steps", DIVIDED)),
    "with": ("T.train", facts.with_block("self.acc.accumulate")),
    "contains": ("T.train", facts.contains("loss = x/self.config.steps")),
    "in the module": (MODULE, facts.contains("self.send(event)")),
    "tolerated": ("T.save", facts.tolerated("self.validate")),
}

UNTRUE: dict[str, tuple[str, Question]] = {
    "calls: other count": ("T.run", facts.calls("self.train", times=2)),
    "calls: other arguments": ("T.run", facts.calls("self.train", arguments=1)),
    "no such function": ("T.walk", facts.exists),
    "mentions one only": ("T.run", facts.mentions("self.train", "self.save")),
    "assigns": ("T.run", facts.assigns("self.type")),
    "assigns constant": ("T.__init__", facts.assigns_constant("self.type", "aws")),
    "assigns constant never": ("T.run", facts.assigns_constant("self.type", "local")),
    "methods": ("T", facts.methods("run(self, x)")),
    "methods of a table": ("table", facts.methods("run(self)")),
    "lacks": ("T", facts.lacks("run")),
    "declares": ("T", facts.declares("size", "weight")),
    "dict": ("table", facts.dict_display("gcs")),
    "dict entry": ("make", facts.dict_entry("colour", "red")),
    "dict inside": ("T.run", facts.dict_display("local", name="mapping")),
    "operand": ("T.train", facts.operand_only("self.config.steps", (ast.Div,))),
    "with": ("T.run", facts.with_block("self.train")),
    "contains": ("T.train", facts.contains("loss = x * self.config.steps")),
}


@pytest.mark.parametrize(("where", "question"), TRUE.values(), ids=TRUE)
def test_true_statements_hold(where: str, question: Question) -> None:
    assert Fact("x", question, where).trouble(TREE, "T") is None


@pytest.mark.parametrize(("where", "question"), UNTRUE.values(), ids=UNTRUE)
def test_untrue_statements_say_what_was_found_and_where(where: str, question: Question) -> None:
    assert str(Fact("x", question).trouble(TREE, where)).endswith(where)


@pytest.mark.parametrize("handler", ["except KeyError:\n        warn()", "except Exception:\n        raise"])
def test_an_error_that_escapes_is_not_tolerated(handler: str) -> None:
    module = ast.parse(f"def f():\n    try:\n        check()\n    {handler}\n")
    assert facts.tolerated("check")(module) == "check, whose errors are not caught,"


def test_an_accumulation_entered_without_with_counts_against_it() -> None:
    module = ast.parse("with self.acc():\n    pass\nstack.enter_context(self.acc())\n")
    assert facts.with_block("self.acc")(module) == "2 calls of self.acc, 1 of them with-blocks"


def test_a_place_is_written_as_one_text() -> None:
    fact = Fact("x", facts.exists)
    spec = seam("t.save", "a.b:T.save(self, *rest)", "ramp, state: why", fact, optional=True)
    assert (spec.module, spec.qualname, spec.parameters) == ("a.b", "T.save", ("self", "*rest"))
    assert (spec.features, spec.facts, spec.optional) == (("ramp", "state"), (fact,), True)
    assert seam("t", "a:f()", "ramp: why").parameters == ()
    assert seam("t", "a:f", "ramp: why").parameters is None


# -- the syntax beneath -----------------------------------------------------------------------------------------


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
    found = syntax.find(ast.parse(source), "f")
    assert isinstance(found, syntax.Function)
    assert syntax.parameters(found) == parameter_names(namespace["f"])  # type: ignore[arg-type]


def test_assignments_see_through_tuples_and_augmented_ones() -> None:
    module = ast.parse("a, (self.b, c) = 1, (2, 3)\nself.b += 1\nself.b: int = 2\nother.b = 3\n")
    assert len(syntax.assignments(module, "self.b")) == 3


def test_mentions_need_the_whole_dotted_name() -> None:
    module = ast.parse("self.config.steps\nconfig.steps\nself.steps\n")
    assert len(syntax.mentions(module, "self.config.steps")) == 1
