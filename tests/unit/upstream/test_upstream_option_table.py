"""What a release would make of keys, flags and variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simpletuner_gh200.upstream.option_table import TABLES, Checker
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
    problems = CHECKER.variables({"LEARNING_RATE": "fast", "LERNING_RATE": "1", "HF_HOME": "/x", "MODEL_TYPE": "$T"})
    assert [str(problem) for problem in problems] == [
        "LEARNING_RATE: 'fast' is not a number",
        "LERNING_RATE: SimpleTuner 9.9 reads no such variable (did you mean 'LEARNING_RATE'?)",
    ]
    dangling = replace(TABLE, variables={"ALLOW_TF32": "allow_tf32", "USE_BITFIT": "lora_type=bitfit"})
    problems = Checker(dangling).variables({"ALLOW_TF32": "true", "USE_BITFIT": "1"})
    assert ["stands for --allow_tf32" in problem.message for problem in problems] == [True]


def test_what_simpletuner_cannot_do_without() -> None:
    needed = replace(TABLE.options["model_type"], required=True)
    checker = Checker(replace(TABLE, options={**TABLE.options, "model_type": needed, "kind_of_model": needed}))
    assert checker.missing({"kind_of_model", "seed"}) == []
    (missing,) = checker.missing({"seed"})
    assert str(missing) == "model_type: not set; SimpleTuner 9.9 needs it (accepted: 'full', 'lora')"


def test_the_table_survives_its_way_through_json() -> None:
    assert TABLES.validate_json(TABLES.dump_json(TABLE)) == TABLE
