"""Each kind of fact, true and untrue."""

from __future__ import annotations

import ast

import pytest

from simpletuner_gh200.upstream import facts

LOOP = """
class T:
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
"""
MODULE = ast.parse(LOOP)
DIVIDED = (ast.Div, ast.Mod)

TRUE = {
    "calls": facts.calls("T.run", "self.train", times=1, arguments=0),
    "mentions": facts.mentions("T.run", "self.train"),
    "looked up on self": facts.looked_up_on_self("T.save"),
    "defines": facts.defines("table"),
    "assigns": facts.assigns("T.__init__", "self.type"),
    "assigns constant": facts.assigns_constant("T.__init__", "self.type", "local"),
    "signature": facts.signature("T.save", ("self", "step")),
    "methods": facts.methods("T", {"run": ("self",), "save": ("self", "step")}),
    "lacks": facts.lacks("T", ("get_raw_config",)),
    "dict": facts.dict_display("table", ("local",)),
    "dict within": facts.dict_display("mapping", ("local",), within="make"),
    "operand": facts.operand_only("T.train", "self.config.steps", DIVIDED),
    "with": facts.with_block("T.train", "self.acc.accumulate"),
    "contains": facts.contains("T.train", "loss = x/self.config.steps"),
    "tolerated": facts.tolerated("T.save", "self.validate"),
    "passes": facts.inside("T.save", facts.passes("self.send", "event")),
}

UNTRUE = {
    "calls: other count": facts.calls("T.run", "self.train", times=2),
    "calls: other arguments": facts.calls("T.run", "self.train", arguments=1),
    "calls: no such function": facts.calls("T.walk", "self.train"),
    "mentions": facts.mentions("T.run", "self.save"),
    "looked up on self": facts.looked_up_on_self("T.run"),
    "defines": facts.defines("other"),
    "assigns": facts.assigns("T.run", "self.type"),
    "assigns constant": facts.assigns_constant("T.__init__", "self.type", "aws"),
    "assigns constant never": facts.assigns_constant("T.run", "self.type", "local"),
    "signature": facts.signature("T.save", ("self",)),
    "signature of a table": facts.signature("table", ()),
    "methods": facts.methods("T", {"run": ("self", "x")}),
    "lacks": facts.lacks("T", ("run",)),
    "dict": facts.dict_display("table", ("gcs",)),
    "dict within": facts.dict_display("mapping", ("local",), within="T.run"),
    "operand": facts.operand_only("T.train", "self.config.steps", (ast.Div,)),
    "with": facts.with_block("T.train", "self.acc.accumulate", times=2),
    "contains": facts.contains("T.train", "loss = x * self.config.steps"),
    "passes": facts.inside("T.save", facts.passes("self.send", "copy")),
}


@pytest.mark.parametrize("predicate", TRUE.values(), ids=TRUE)
def test_true_statements_hold(predicate: facts.Predicate) -> None:
    assert predicate(MODULE) is None


@pytest.mark.parametrize("predicate", UNTRUE.values(), ids=UNTRUE)
def test_untrue_statements_say_what_was_found(predicate: facts.Predicate) -> None:
    assert predicate(MODULE)


@pytest.mark.parametrize("handler", ["except KeyError:\n        warn()", "except Exception:\n        raise"])
def test_an_error_that_escapes_is_not_tolerated(handler: str) -> None:
    module = ast.parse(f"def f():\n    try:\n        check()\n    {handler}\n")
    assert facts.tolerated("f", "check")(module) == "what check raises stops f"


def test_an_accumulation_entered_without_with_counts_against_it() -> None:
    module = ast.parse("def f(self):\n    with self.acc():\n        pass\n    stack.enter_context(self.acc())\n")
    assert facts.with_block("f", "self.acc")(module) == "1 with-blocks of self.acc and 1 other calls in f"


def test_all_of_reports_the_first_untrue_one() -> None:
    both = facts.all_of(TRUE["calls"], UNTRUE["defines"], UNTRUE["mentions"])
    assert both(MODULE) == "no other"
