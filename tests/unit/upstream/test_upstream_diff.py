"""Comparing two SimpleTuners."""

from __future__ import annotations

from typing import Any

import pytest

from simpletuner_gh200.upstream import diff
from simpletuner_gh200.upstream.diff import review_lines
from simpletuner_gh200.upstream.source import JoinedSource
from simpletuner_gh200.upstream.spec import SeamSpec

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


def compared(new: str) -> dict[str, Any]:
    texts = {"1": OLD.encode(), "2": new.encode()}
    one, two = (JoinedSource({"simpletuner": {"simpletuner.t": texts[name]}.get}, name) for name in texts)
    return diff.compare(one, two)


def test_moved_reformatted_and_unrelated_code_is_no_change() -> None:
    new = "import os\n" + OLD.replace("# a comment", "# another").replace("pass", "return 3")
    found = compared(new.replace("return 1", "return (1)"))
    assert found["seams"] == []
    assert found["untouched"] == ["t"]


def test_a_changed_body_is_shown() -> None:
    found = compared(OLD.replace("return 1", "return 2"))
    (change,) = found["seams"]
    assert {"-    return 1", "+    return 2"} < set(change["diff"])
    assert found["ok"]


@pytest.mark.parametrize(
    ("before", "after", "change", "added"),
    [
        ("self.train()", "self.train()\n        self.rest()", "changed", 1),
        ("def run(self):\n        self.train()", "def walk(self): pass", "removed", 0),
        ("def rest(self):\n        pass", "def run_again(self): self.train()", "added", 2),
    ],
)
def test_a_changed_user_is_listed(before: str, after: str, change: str, added: int) -> None:
    (seam,) = compared(OLD.replace(before, after))["seams"]
    assert seam["diff"] == []
    (near,) = seam["around"]
    assert (near["change"], near["added"]) == (change, added)


def test_a_broken_seam_is_a_regression_and_leads_the_review() -> None:
    found = compared(OLD.replace("def train(self)", "def train(self, n)"))
    assert not found["ok"]
    lines = list(review_lines(found))
    assert lines[0] == "SimpleTuner 1 -> 2: 1 seam touched, 0 untouched"
    assert lines[1].startswith("  feature ramp: on -> off: seam t: T.train(self, n)")


def test_a_long_diff_is_cut_unless_asked_for() -> None:
    found = compared(OLD.replace("return 1", "\n        ".join(f"x{n} = {n}" for n in range(300))))
    short, full = (list(review_lines(found, full=full)) for full in (False, True))
    assert any("more lines (--full)" in line for line in short)
    assert len(full) > len(short)
