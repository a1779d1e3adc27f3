"""What a release would make of keys, flags and variables; and the table's way from a child into the cache."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.upstream import option_reading, user_cache
from simpletuner_gh200.upstream.option_reading import installed_options
from simpletuner_gh200.upstream.option_table import Checker, OptionTable
from tests.unit.few_options import TABLE

CHECKER = Checker(TABLE, frozenset({"cache_config", "datasets"}), ("--config", "--dry-run"))


def told(**values: Any) -> list[str]:
    return [str(problem) for problem in CHECKER.keys(values)[0]]


def test_what_the_release_knows_has_no_problem() -> None:
    sound = {
        "--learning_rate": 1e-4,
        "max_train_steps": "5",
        "training_steps": 5,
        "gradient_checkpointing": True,
        "validation_disable": "false",
        "model_family": "SDXL",
        "report_to": ["wandb", "tensorboard"],
        "webhook_config": [{"webhook_url": "x"}],
        "hub_token": None,
        "seed": "{env:SEED}",
        "max_train_steps ": "{env:STEPS}",
        "ignore_final_epochs": True,
        "repeats": 3,
        "cache_config": {},
        "datasets": [],
    }
    assert CHECKER.keys(sound) == ([], [])


def test_unknown_keys_are_quoted_with_what_was_meant() -> None:
    assert told(lerning_rate=1e-4) == [
        "lerning_rate = 0.0001: unknown to SimpleTuner 9.9 (did you mean 'learning_rate'?)"
    ]
    assert told(cache_confgi=True) == ["cache_confgi = True: unknown to SimpleTuner 9.9 (did you mean 'cache_config'?)"]
    assert told(**{"resolution-type": "pixel"}) == [
        "resolution-type = 'pixel': unknown to SimpleTuner 9.9 (did you mean 'resolution_type'?)"
    ]
    (far,) = told(quite_another_thing="x" * 100)
    assert far.endswith("...': unknown to SimpleTuner 9.9 (leave it out)") and len(far) < 140
    (gone,) = told(enable_group_offload=True)
    assert "until 4.x" in gone and "leave it out" in gone


def test_a_name_cut_short_is_not_left_to_the_parsers_guess() -> None:
    (short,) = told(max_train_step=3)
    assert "not written out" in short and "did you mean 'max_train_steps'?" in short


def test_a_key_of_ours_outside_its_block_is_shown_its_place() -> None:
    (problem,) = told(use_uvm=True)
    assert problem.endswith("(it is a key of ours: write it inside gh200_optimizations)")
    assert "inside cache_config" in str(CHECKER.flags(["--vae_cache_type=unified_memory"])[0])


def test_what_simpletuner_drops_in_silence_is_a_note() -> None:
    problems, notes = CHECKER.keys({"webhook_confg": {"a": 1}, "learning_rat": None, "sed": ""})
    assert problems == []
    assert notes == ["webhook_confg: SimpleTuner 9.9 ignores it (did you mean 'webhook_config'?)"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_train_steps": 1.5}, "max_train_steps: '1.5' is not a whole number"),
        ({"max_train_steps": True}, "max_train_steps: needs a value"),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a number"),
        ({"gradient_checkpointing": "perhaps"}, "gradient_checkpointing: 'perhaps' is neither true nor false"),
        ({"mixed_precision": "fp17"}, "accepted: 'no', 'fp16', 'bf16', 'fp8'"),
        ({"model_family": "sdlx"}, "accepted: 'flux', 'sd3', 'sdxl', 'qwen_image'"),
        ({"train_batch_size": [1, "two"]}, "train_batch_size: 'two' is not a whole number"),
    ],
)
def test_values_of_the_wrong_kind(values: dict[str, Any], words: str) -> None:
    (problem,) = told(**values)
    assert words in problem


def test_flags_are_judged_as_they_are_typed() -> None:
    assert CHECKER.flags(["--learning_rate=1", "--gradient_checkpointing", "--seed", "-5", "--cache-config={}"]) == []
    problems = [str(problem) for problem in CHECKER.flags(["--max_train_step", "3", "--confg", "x", "--seed"])]
    assert problems[0].startswith("--max_train_step '3': ") and "'--max_train_steps'?" in problems[0]
    assert problems[1] == "--confg 'x': unknown to SimpleTuner 9.9 (did you mean '--config'?)"
    assert problems[2] == "--seed: needs a value"
    assert "did you mean '--dry-run'?" in str(CHECKER.flags(["--dry_run"])[0])
    assert "'--learning_rate'?" in str(CHECKER.flags(["--learning-rate=1"])[0])
    assert "unknown" in str(CHECKER.flags(["--repeats=1"])[0])  # a key of files only
    assert "register_manual_validation_trigger()" in str(CHECKER.flags(["--enable_manual_validation"])[0])


def test_variables_of_an_env_file() -> None:
    problems, notes = CHECKER.variables(
        {"LEARNING_RATE": "fast", "LERNING_RATE": "1", "HF_HOME": "/x", "MODEL_TYPE": "$T"}
    )
    assert [str(problem) for problem in problems] == ["LEARNING_RATE: 'fast' is not a number"]
    assert notes == ["LERNING_RATE: SimpleTuner reads no such variable (did you mean 'LEARNING_RATE'?)"]
    dangling = replace(TABLE, variables={"ALLOW_TF32": "allow_tf32", "USE_BITFIT": "lora_type=bitfit"})
    problems, _notes = Checker(dangling).variables({"ALLOW_TF32": "true", "USE_BITFIT": "1"})
    assert ["stands for --allow_tf32" in problem.message for problem in problems] == [True]


def test_what_simpletuner_cannot_do_without() -> None:
    needed = replace(TABLE.options["model_type"], required=True)
    checker = Checker(replace(TABLE, options={**TABLE.options, "model_type": needed, "kind_of_model": needed}))
    assert checker.missing({"kind_of_model", "seed"}) == []
    (missing,) = checker.missing({"seed"})
    assert str(missing) == "model_type: not set; SimpleTuner 9.9 needs it (accepted: 'full', 'lora')"


# -- how it is come by -----------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A SimpleTuner that is found and never imported."""
    package = tmp_path / "site" / "simpletuner"
    (package / "helpers" / "configuration").mkdir(parents=True)
    (package / "helpers" / "configuration" / "cmd_args.py").write_text("")
    monkeypatch.setattr(option_reading, "find_package", lambda _name: package)
    monkeypatch.setattr(option_reading, "installed_version", lambda _name: "9.9")
    return package


def test_the_table_survives_its_way_through_json() -> None:
    assert OptionTable.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


def test_it_is_made_once_and_again_when_the_release_changes(few_options: None, here: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        assert installed_options(said.append) == option_reading.Reading(TABLE)
    assert len(said) == 1
    (here / "helpers" / "configuration" / "cmd_args.py").write_text("# changed")
    installed_options(said.append)
    assert len(said) == 2


def test_a_cache_that_cannot_be_written_costs_time_and_is_told(few_options: None, here: Path) -> None:
    (user_cache.cache_root() / option_reading.KIND).write_text("in the way")
    reading = installed_options()
    assert reading.table == TABLE
    assert "read anew at every start" in reading.notes[0] and "XDG_CACHE_HOME" in reading.notes[0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no such thing')", "exit code 1: ImportError: no such thing"),
        ("print('not a table')", "gave no table but 'not a table'"),
        ("print('[]')", "gave no table but '[]'"),
        ("pass", "gave no table but ''"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_a_child_that_fails_is_told_and_stops_nothing(
    private_cache: Path, here: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr(option_reading, "MAKER", (sys.executable, "-S", "-c", code))
    monkeypatch.setattr(option_reading, "PATIENCE_SECONDS", 0.2 if "sleep" in code else 60)
    reading = installed_options()
    assert reading.table is None
    assert reading.notes[0].startswith("SimpleTuner's own options were not checked: ") and reason in reading.notes[0]


def test_a_torn_entry_is_made_again(few_options: None, here: Path) -> None:
    installed_options()
    (entry,) = (user_cache.cache_root() / option_reading.KIND).iterdir()
    entry.write_text('{"version": "9.9", "options": {"a": {"nonsense": 1}}')
    assert installed_options().table == TABLE
    entry.write_text('{"version": "9.9"}')
    assert installed_options().table == TABLE


def test_the_child_sees_our_packages_and_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    found = option_reading._environment({"SIMPLETUNER_GH200": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HOME": "/x"})
    assert found["SIMPLETUNER_GH200"] == "0" and found["HF_HOME"] == "/x"
    assert "PYTHONDONTWRITEBYTECODE" not in found
    assert all(Path(place).is_absolute() for place in found["PYTHONPATH"].split(":"))


def test_without_simpletuner_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_reading, "find_package", lambda _name: None)
    reading = installed_options()
    assert reading.table is None and "is not installed" in reading.notes[0]
