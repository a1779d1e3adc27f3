"""Comparing two SimpleTuners."""

from __future__ import annotations

import pytest

from simpletuner_gh200.upstream import diff
from simpletuner_gh200.upstream.diff import review_lines
from simpletuner_gh200.upstream.source import JoinedSource
from simpletuner_gh200.upstream.spec import SeamSpec
from tests.unit.upstream.upstream_samples import Texts

OLD = """
class T:
    def train(self):
        # a comment
        return 1
    def run(self):
        self.train()
    def rest(self):
        pass
"""
SPECS = {"t": SeamSpec("t", "simpletuner.t", "T.train", ("self",), ("ramp",), "the loop")}


@pytest.fixture(autouse=True)
def one_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "all_specs", lambda: SPECS)


def source(text: str) -> JoinedSource:
    return JoinedSource("x", {"simpletuner": Texts({"simpletuner.t": text.encode()})})


def compared(new: str) -> diff.ReleaseComparison:
    sources = (JoinedSource("x", {"simpletuner": Texts({"simpletuner.t": text.encode()})}) for text in (OLD, new))
    return diff.compare(*sources, versions=("1", "2"))


def test_moved_reformatted_and_unrelated_code_is_no_change() -> None:
    new = "import os\n" + OLD.replace("# a comment", "# another").replace("pass", "return 3").replace(
        "return 1", "return (1)"
    )
    found = compared(new)
    assert found.changes == ()
    assert found.untouched == ("t",)


def test_a_changed_body_is_shown() -> None:
    (change,) = compared(OLD.replace("return 1", "return 2")).changes
    assert "-    return 1" in change.lines
    assert "+    return 2" in change.lines
    assert not change.is_regression


def test_a_changed_user_is_listed() -> None:
    (change,) = compared(OLD.replace("self.train()", "self.train()\n        self.rest()")).changes
    assert change.lines == ()
    assert change.around == (diff.Around("T.run", "changed", 1, 0),)


def test_a_lost_user_is_listed() -> None:
    (change,) = compared(OLD.replace("def run(self):\n        self.train()", "def walk(self): pass")).changes
    assert [(near.qualname, near.change) for near in change.around] == [("T.run", "removed")]


def test_a_broken_seam_is_a_regression_and_leads_the_review() -> None:
    found = compared(OLD.replace("def train(self)", "def train(self, n)"))
    assert not found.ok
    lines = list(review_lines(found))
    assert lines[0] == "SimpleTuner 1 -> 2: 1 seam touched, 0 untouched"
    assert lines[1].startswith("  feature ramp: on -> off: seam t: T.train(self, n)")


def test_a_long_diff_is_cut_unless_asked_for() -> None:
    found = compared(OLD.replace("return 1", "\n        ".join(f"x{n} = {n}" for n in range(300))))
    short, full = (list(review_lines(found, full=full)) for full in (False, True))
    assert any("more lines (--full)" in line for line in short)
    assert len(full) > len(short)
