"""SimpleTuner's own rules about a configuration: asked of SimpleTuner, in a process of its own (``seams/rules``).

So that the next release's rules come by themselves. It costs an import each time, which is why only ``gh200 config
check`` asks: a start runs into the same rules some seconds later, in the rank, and would only be slower.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simpletuner_gh200.errors import Problem
from simpletuner_gh200.upstream.child import NoAnswer, ask
from simpletuner_gh200.upstream.importing import Say
from simpletuner_gh200.upstream.source import installed_version

RULES = (sys.executable, "-m", "simpletuner_gh200.seams.rules")

_NAMED = re.compile(r"--([a-z][a-z0-9_]+)|\b([a-z0-9]+(?:_[a-z0-9]+)+)\b")
_KIND = re.compile(r"^(ValueError|Exception|RuntimeError): ")
"""Exceptions that say all in their words."""


def broken_rules(
    values: Mapping[str, Any],
    datasets: Sequence[Mapping[str, Any]],
    ranks: int,
    options: Iterable[str],
    say: Say = lambda _words: None,
) -> tuple[list[Problem], list[str]]:
    """(problems, notes): what SimpleTuner would stop at before it has a model, and whether it could be asked.

    ``values`` and ``datasets`` as SimpleTuner is to see them, with nothing of ours; ``options`` are the names it knows.
    """
    say("running SimpleTuner's own checks ...")
    question = {"folder": os.getcwd(), "values": values, "datasets": datasets, "ranks": ranks}
    try:
        refusals = ask(RULES, "refusals", question, HF_HUB_OFFLINE="1")["refusals"]
    except NoAnswer as none:
        return [], [f"SimpleTuner's own rules were not checked: {none}"]
    known = frozenset(options)
    problems = (problem(refusal["where"], refusal["what"], known) for refusal in refusals)
    return list(dict.fromkeys(problems)), []


def problem(where: str, words: str, options: frozenset[str]) -> Problem:
    """Where none is given: the first of its options that the words name."""
    named = (flag or word for flag, word in _NAMED.findall(words))
    place = where or next((name for name in named if name in options), "configuration")
    return Problem(place, refuses(words))


def refuses(words: str) -> str:
    """A check and a run that ends so say the same."""
    return f"SimpleTuner {installed_version('simpletuner')} refuses it: {_KIND.sub('', words)}"
