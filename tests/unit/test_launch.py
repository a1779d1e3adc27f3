"""A rank that ``accelerate launch train.py`` starts is checked first, once per node, and not where somebody did so."""

from __future__ import annotations

import json
import os
import sys

import pytest

from simpletuner_gh200 import launch
from simpletuner_gh200.config.environment import LIFELINE, PLACEMENT, SWITCH
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.errors import ConfigError, Problem
from simpletuner_gh200.operate.preflight import Checked


@pytest.fixture
def called(monkeypatch):
    found = []
    for name in (LIFELINE, SWITCH, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "run_rank", lambda arguments, _say: found.append(("trained", *arguments)) or 0)
    passed = Checked(Training("x.json"), resolve({"gh200_optimizations": {"memory": "manual"}}, {}), ("a note",))
    monkeypatch.setattr(launch, "check_rank", lambda words, _say: found.append(("checked", *words)) or passed)
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


def test_the_first_rank_decides_where_nobody_did(called, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(PLACEMENT, "")
    file = tmp_path / "config.json"
    file.write_text('{"model_family": "flux", "gh200_optimizations": {"memory": "auto"}}')
    training = read_training(Located.at(file), {})
    passed = Checked(training, training.raise_if_bad())
    monkeypatch.setattr(launch, "check_rank", lambda words, _say: passed)
    assert launch.main([]) == 0
    assert "gh200: memory auto: there is no GPU" in capsys.readouterr().err
    assert json.loads(os.environ[PLACEMENT])["settings"]


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
