"""A hunk is replaced by a seam only if it is about our subject, in a wrapped place, and takes nothing away."""

from __future__ import annotations

import difflib

import pytest

from simpletuner_gh200.compat.rebase import fork_report
from simpletuner_gh200.compat.rebase.fork_report import MODULE

OLD = """import os


class Trainer:
    def train(self):
        self.step()
        self.log()

    def log(self):
        pass
"""
SEAMS = {"Trainer.train": "trainer.train"}


def judged(new: str) -> list[tuple[str, list[str]]]:
    diff = "\n".join(difflib.unified_diff(OLD.splitlines(), new.splitlines(), n=0, lineterm=""))
    before, after = fork_report._functions(OLD.encode()), fork_report._functions(new.encode())
    found = [fork_report.judge(hunk, before, after, SEAMS) for hunk in fork_report.HUNK.finditer(diff)]
    return [(hunk["where"], hunk["replaced_by"]) for hunk in found]


@pytest.mark.parametrize(
    ("before", "after", "where", "replaced"),
    [
        ("        self.step()\n", "        gh200_hint()\n        self.step()\n", "Trainer.train", True),
        ("        self.step()\n", "        self.count += 1\n        self.step()\n", "Trainer.train", False),
        ("        self.step()\n", "        self.gh200_step()\n", "Trainer.train", False),
        ("        pass\n", "        gh200_hint()\n        pass\n", "Trainer.log", False),
        ("import os\n", "import os\nfrom simpletuner.gh200 import uvm\n", MODULE, True),
        ("import os\n", "import os\nGH200 = read()\n", MODULE, False),
        ("        self.log()\n", "", "Trainer.train", False),
    ],
)
def test_a_hunk_is_replaced_only_where_everything_agrees(before: str, after: str, where: str, replaced: bool) -> None:
    assert judged(OLD.replace(before, after)) == [(where, ["trainer.train"] if replaced else [])]


def test_an_unrelated_hunk_beside_a_replaced_one_is_seen() -> None:
    new = OLD.replace("        self.step()\n", "        uvm_prefetch()\n        self.step()\n").replace(
        "pass", "save()"
    )
    assert judged(new) == [("Trainer.train", ["trainer.train"]), ("Trainer.log", [])]


def test_a_hunk_mostly_about_something_else_is_for_a_person() -> None:
    new = OLD.replace("self.step()\n", "a()\n        b()\n        c()\n        gh200()\n        self.step()\n")
    assert judged(new) == [("Trainer.train", [])]
