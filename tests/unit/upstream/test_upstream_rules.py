"""What becomes of SimpleTuner's answer, and of none: a check that can't ask says so and goes on."""

from __future__ import annotations

import sys

import pytest

from simpletuner_gh200.upstream import rules


def asked(monkeypatch: pytest.MonkeyPatch, *command: str) -> tuple[list[str], list[str]]:
    monkeypatch.setattr(rules, "RULES", command)
    problems, notes = rules.broken_rules({"seed": 1}, [], 1, {"num_train_epochs", "seed"})
    return list(map(str, problems)), notes


def test_a_refusal_stands_at_the_option_that_it_names(monkeypatch):
    answer = '{"refusals": [{"where": "", "what": "ValueError: set --num_train_epochs"}, {"where": "x", "what": "no"}]}'
    problems, notes = asked(monkeypatch, sys.executable, "-S", "-c", f"print({answer!r})")
    assert notes == []
    assert [problem.partition(":")[0] for problem in problems] == ["num_train_epochs", "x"]
    assert problems[0].endswith("refuses it: set --num_train_epochs")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("no-such-program",), "no process could be started"),
        ((sys.executable, "-S", "-c", "raise SystemExit('torn in two')"), "torn in two"),
        ((sys.executable, "-S", "-c", "print('{}')"), "exit code 0"),
    ],
)
def test_no_answer_is_a_note(monkeypatch, command, words):
    problems, (note,) = asked(monkeypatch, *command)
    assert problems == [] and "were not checked" in note and words in note
