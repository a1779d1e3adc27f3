"""``gh200 ramp`` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.errors import ConfigError, UsageError

KEYS = {"initial_effective_batch_size": 4, "target_effective_batch_size": 16, "batch_rampup_steps": 12}
CONFIG = {
    "train_batch_size": 2,
    "max_train_steps": 8,
    "gh200_optimizations": {"enable_batch_size_rampup": True, **KEYS},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def run(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), ["ramp", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_is_one_object_and_nothing_else(config: Path) -> None:
    told = json.loads(run(config, "--json", "--world", 2))
    assert told["windows"] == [1, 1, 1, 1, 1, 2, 2, 3]
    assert (told["initial"], told["target"], told["world"]) == (4, 16, 2)
    assert [change["step"] for change in told["changes"]] == [0, 5, 7]
    assert told["total_samples"] == sum(told["windows"]) * 4


def test_the_table_and_the_drawing_are_printed(config: Path) -> None:
    shown = run(config)
    assert "accumulation" in shown
    assert "█" in shown
    assert "8 optimizer steps" in shown
    assert "batch_rampup_steps 12 counts micro-batches per rank, not optimizer steps" in " ".join(shown.split())


def test_a_picture_is_written(config: Path, tmp_path: Path) -> None:
    run(config, "-o", tmp_path / "ramp.svg")
    assert (tmp_path / "ramp.svg").read_bytes().startswith(b"<svg")


def test_toml_and_older_spelling(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("train_batch_size = 2\nmax_train_steps = 8\n" + "\n".join(f"{k} = {v}" for k, v in KEYS.items()))
    assert json.loads(run(file, "--json"))["target"] == 16


def test_an_unknown_picture_and_a_missing_key_are_usage_and_configuration_errors(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.gif"):
        run(config, "-o", tmp_path / "ramp.gif")
    config.write_text(json.dumps({**CONFIG, "max_train_steps": None}))
    with pytest.raises(ConfigError, match="max_train_steps"):
        run(config)
    config.write_text(json.dumps({"train_batch_size": 1, "max_train_steps": 4}))
    with pytest.raises(ConfigError, match="initial_effective_batch_size"):
        run(config)
