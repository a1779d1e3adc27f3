"""Plain SimpleTuner with the extension on: ``train.py --config PATH``, as the guides print it."""

from __future__ import annotations

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.seams import bootstrap
from simpletuner_gh200.seams.bootstrap import plain_launch
from simpletuner_gh200.seams.runtime import Launch


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What ``plain_launch`` puts there goes with the test."""
    for name in ("CONFIG_BACKEND", "CONFIG_PATH"):
        monkeypatch.setenv(name, "")


def test_the_file_that_was_named_is_the_one_that_is_trained(tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("")
    launch = plain_launch(["simpletuner/train.py", "--config", str(config), "--max_train_steps", "10"])
    assert launch == Launch(config_path=str(config), flags=("--max_train_steps", "10"))
    assert bootstrap.os.environ["CONFIG_BACKEND"] == "toml"
    assert bootstrap.os.environ["CONFIG_PATH"] == str(config)


def test_without_a_file_everything_is_left_to_simpletuner():
    assert plain_launch(["/site-packages/simpletuner/train.py", "--max_train_steps", "10"]) == Launch()
    assert bootstrap.os.environ["CONFIG_PATH"] == ""


def test_other_programs_have_a_config_of_their_own():
    assert plain_launch(["pytest", "--config", "nowhere.json"]) == Launch()
    assert plain_launch([]) == Launch()


def test_a_file_that_is_not_there_is_refused_instead_of_training_another():
    with pytest.raises(UsageError, match=r"nowhere\.json: no such file"):
        plain_launch(["train.py", "--config", "nowhere.json"])
