"""A plain process with the extension in it: what it trains, as the guides print it, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.seams import bootstrap
from simpletuner_gh200.seams.bootstrap import plain_launch
from simpletuner_gh200.seams.runtime import Launch

PROCESS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from simpletuner_gh200.seams import bootstrap

told = threading.Event()
runtime = SimpleNamespace(close=told.set, outcome=SimpleNamespace(status="completed"))
bootstrap._close_at_exit(runtime)
assert "torch" not in sys.modules
pool = ThreadPoolExecutor(1)
pool.submit(lambda: print("told to stop" if told.wait(20) else "left alone"))
"""


def test_quiet_work_is_stopped_before_python_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "told to stop"


def test_what_still_trains_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, closed = [], []
    runtime = SimpleNamespace(close=lambda: closed.append(True), outcome=SimpleNamespace(status="training"))
    monkeypatch.setattr(bootstrap.threading, "_register_atexit", hooks.append)
    monkeypatch.setattr(bootstrap.atexit, "register", hooks.append)
    bootstrap._close_at_exit(runtime)  # type: ignore[arg-type]
    at_exit, early = hooks
    early()
    assert not closed
    at_exit()
    assert closed


@pytest.fixture
def own_environment(monkeypatch):
    """What ``plain_launch`` puts there goes with the test."""
    for name in ("CONFIG_BACKEND", "CONFIG_PATH"):
        monkeypatch.setenv(name, "")


def test_the_file_that_was_named_is_the_one_that_is_trained(own_environment, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("")
    launch = plain_launch(["simpletuner/train.py", "--config", str(config), "--max_train_steps", "10"])
    assert launch == Launch(config_path=str(config), flags=("--max_train_steps", "10"))
    assert bootstrap.os.environ["CONFIG_BACKEND"] == "toml"
    assert bootstrap.os.environ["CONFIG_PATH"] == str(config)


def test_without_a_file_everything_is_left_to_simpletuner(own_environment):
    assert plain_launch(["/site-packages/simpletuner/train.py", "--max_train_steps", "10"]) == Launch()
    assert bootstrap.os.environ["CONFIG_PATH"] == ""
    # Other programs have a --config of their own.
    assert plain_launch(["pytest", "--config", "nowhere.json"]) == Launch()
    assert plain_launch([]) == Launch()


def test_a_file_that_is_not_there_is_refused_instead_of_training_another():
    with pytest.raises(UsageError, match=r"nowhere\.json: no such file"):
        plain_launch(["train.py", "--config", "nowhere.json"])
