"""A rank that ``accelerate launch train.py`` starts is checked first, once per node, and not where somebody did so."""

from __future__ import annotations

import sys

import pytest

from simpletuner_gh200 import launch
from simpletuner_gh200.config.environment import LIFELINE, SWITCH
from simpletuner_gh200.errors import ConfigError, Problem


@pytest.fixture
def called(monkeypatch):
    found = []
    for name in (LIFELINE, SWITCH, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "run_rank", lambda arguments, _say: found.append(("trained", *arguments)) or 0)
    monkeypatch.setattr(
        launch, "check_rank", lambda arguments, _say: found.append(("checked", *arguments)) or ("a note",)
    )
    return found


def test_it_is_checked_and_told_before_it_trains(called, capsys):
    assert launch.main(["--config", "x.json"]) == 0
    assert called == [("checked", "--config", "x.json"), ("trained", "--config", "x.json")]
    assert capsys.readouterr().err == "gh200: a note\n"


def test_simpletuners_own_script_is_checked_too(called, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simpletuner/train.py", "--seed=1"])
    monkeypatch.setattr(launch, "activate", lambda: called.append("active"))
    monkeypatch.setattr(launch, "heard_by", lambda _runtime: print)
    monkeypatch.setattr("atexit.register", called.append)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "print", print)
    launch.plain()
    assert called == [("checked", "--seed=1"), launch._end_plain, "active"]
    assert capsys.readouterr().err == "gh200: a note\n"


@pytest.mark.parametrize("variable", [(LIFELINE, "abc"), (SWITCH, "0"), ("LOCAL_RANK", "1")], ids=lambda v: v[0])
def test_it_is_not_checked_twice_nor_where_we_are_off(called, monkeypatch, variable):
    monkeypatch.setenv(*variable)
    assert launch.main([]) == 0
    assert called == [("trained",)]


def test_what_is_wrong_ends_it_there(called, monkeypatch, capsys):
    def refuse(_arguments, _say):
        raise ConfigError([Problem("lerning_rate", "unknown", "did you mean 'learning_rate'?")], source="x.json")

    monkeypatch.setattr(launch, "check_rank", refuse)
    assert launch.main([]) == 2
    with pytest.raises(SystemExit) as left:
        launch.plain()
    assert (called, left.value.code) == ([], 2)
    assert capsys.readouterr().err.count("lerning_rate") == 2
