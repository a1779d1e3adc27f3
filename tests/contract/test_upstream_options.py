"""The option table against SimpleTuner's own parser: what the one accepts, the other accepts."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

cmd_args = pytest.importorskip("simpletuner.helpers.configuration.cmd_args", reason="needs SimpleTuner")

from simpletuner.helpers.configuration import cli_utils, env_file  # noqa: E402
from simpletuner.helpers.training import optimizer_param  # noqa: E402

from simpletuner_gh200.config.files import find_package  # noqa: E402
from simpletuner_gh200.errors import Problem  # noqa: E402
from simpletuner_gh200.seams.probe import read_options  # noqa: E402
from simpletuner_gh200.upstream.importing import check_import  # noqa: E402
from simpletuner_gh200.upstream.option_table import Checker, Option, OptionTable  # noqa: E402

pytestmark = pytest.mark.real

OURS = Path(__file__).parents[2] / "config"


def is_json(path: Path) -> bool:
    """One of upstream's own examples is not."""
    try:
        return bool(json.loads(path.read_text()))
    except json.JSONDecodeError:
        return False


EXAMPLES = [
    path
    for path in sorted([*find_package("simpletuner").glob("examples/**/config.json"), *OURS.glob("*example.json")])
    if is_json(path)
]
BLOCKS = frozenset({"cache_config", "gh200_optimizations"})
NEEDED = {
    "model_family": "sdxl",
    "model_type": "lora",
    "optimizer": "adamw_bf16",
    "output_dir": "out",
    "data_backend_config": "datasets.json",
}
VALUES = {
    "int": ("3", "-2", " 4 ", "1.5", "1e3", "many", ""),
    "float": ("3", "-2.5", "1e-4", "nan", "much", ""),
    "switch": ("true", "FALSE", "1", "0", "yes", "Off", "2", "maybe"),
    "text": ("x", "a b", "1"),
    "any": (),
}


class Parsed(BaseException):
    """Whether the parser took everything; what SimpleTuner does then is not asked."""


@pytest.fixture(scope="module")
def table() -> OptionTable:
    return read_options()


@pytest.fixture(scope="module")
def checker(table: OptionTable) -> Checker:
    return Checker(table, BLOCKS)


def accepts(words: list[str]) -> bool:
    """Do SimpleTuner's own rewriting and its own parser take these words?"""
    parser = cmd_args.get_argument_parser()

    def parse_and_stop(arguments: list[str]) -> None:
        try:
            type(parser).parse_args(parser, arguments)
        except (argparse.ArgumentError, SystemExit):
            raise Parsed(False) from None
        raise Parsed(True)

    parser.parse_args = parse_and_stop
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            cmd_args.parse_cmdline_args(words)
    except Parsed as parsed:
        return bool(parsed.args[0])
    finally:
        del parser.parse_args
    raise AssertionError("SimpleTuner's parser was not asked")


def needed_but(*names: str) -> list[str]:
    return [f"--{name}={value}" for name, value in NEEDED.items() if name not in names]


def tried(option: Option) -> Iterator[str]:
    yield from option.choices
    if option.later:
        return  # the parser takes what the next to look refuses
    yield from VALUES[option.kind]
    if option.choices:
        yield from (option.choices[0].upper(), "no-such-value")


def test_each_option_takes_and_refuses_what_the_parser_does(table: OptionTable, checker: Checker) -> None:
    different = []
    for spelling, option in table.options.items():
        rest = needed_but(option.name)
        for value in tried(option):
            word = f"--{spelling}={value}"
            if accepts([*rest, word]) == bool(checker.flags([word])):
                different.append(word)
    assert different == []
    assert len(table.options) > 300


def test_an_optimizer_is_one_of_those_that_simpletuner_describes(table: OptionTable, checker: Checker) -> None:
    """Its parser takes any; right after it, an unknown one is a traceback."""
    optimizer = table.options["optimizer"]
    assert optimizer.later and set(optimizer.choices) >= set(optimizer_param.optimizer_choices)
    assert {"adamw_bf16", "torch-adamw", "optimi-adamw", "bnb-adamw8bit"} <= set(optimizer.choices)
    (problem,), _notes = checker.keys({"optimizer": "adamw_bf17"})
    assert "'adamw_bf17' is not among its values" in str(problem) and "did you mean 'adamw_bf16'?" in str(problem)
    with pytest.raises(ValueError, match="adamw_bf17 not found"):
        optimizer_param.optimizer_parameters("adamw_bf17", argparse.Namespace())


def test_an_option_without_a_value(table: OptionTable, checker: Checker) -> None:
    different = [
        name
        for name in sorted(table.options)[::7]
        if accepts([*needed_but(table.options[name].name), f"--{name}"]) == bool(checker.flags([f"--{name}"]))
    ]
    assert different == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_example_fares_as_with_the_parser(checker: Checker, path: Path) -> None:
    """Not all of upstream's own pass: 3.1.6 and 4.10.1 each ship one or two that their parser refuses."""
    config = json.loads(path.read_text())
    words = [word for word in cli_utils.mapping_to_cli_args(config) if word.partition("=")[0].lstrip("-") not in BLOCKS]
    problems, _notes = checker.keys(config)
    problems += checker.missing(key.lstrip("-") for key in config)
    assert accepts(words) == (not problems), [str(problem) for problem in problems]


def test_no_example_of_ours_has_a_problem(checker: Checker) -> None:
    for path in OURS.glob("*example.json"):
        assert checker.keys(json.loads(path.read_text())) == ([], [])


@pytest.mark.parametrize("value", [True, False, "true", "FALSE", "", None, 3, 1.5, ["a", "b"], {"a": 1}, "text"])
def test_a_value_of_a_file_fares_as_it_does_on_its_way_to_the_parser(checker: Checker, value: Any) -> None:
    different = []
    for name in ("seed", "learning_rate", "gradient_checkpointing", "output_dir", "lerning_rate", "webhook_config"):
        words = [*needed_but(name), *cli_utils.mapping_to_cli_args({name: value})]
        given = set(NEEDED) if name not in NEEDED or cli_utils.mapping_to_cli_args({name: value}) else set()
        problems: list[Problem] = [*checker.keys({name: value})[0], *(checker.missing(given) if given else ())]
        if given and accepts(words) == bool(problems):
            different.append((name, words[-1]))
    assert different == []


def test_every_key_of_a_dataset_list_is_known_and_slips_are_not(table: OptionTable, checker: Checker) -> None:
    lists = [*find_package("simpletuner").glob("examples/**/*.json"), *OURS.glob("*datasets.json")]
    entries = [entry for path in lists if is_json(path) for entry in datasets_in(json.loads(path.read_text()))]
    assert len(entries) > 10
    assert {key for entry in entries for key in entry} - table.dataset_words == {"in_memory"}
    for slip, meant in (
        ("caption_stratgy", "caption_strategy"),
        ("cache_dir_va", "cache_dir_vae"),
        ("repeat", "repeats"),
    ):
        (note,) = checker.dataset("it", {slip: 1})
        assert f"did you mean {meant!r}?" in note
    assert checker.dataset("it", {"a_note_of_mine": 1, "in_memory": {}}, ("in_memory",)) == []


def datasets_in(content: Any) -> list[dict[str, Any]]:
    return (
        [entry for entry in content if isinstance(entry, dict) and "id" in entry] if isinstance(content, list) else []
    )


def test_older_spellings_and_every_variable_are_taken(table: OptionTable, checker: Checker) -> None:
    assert checker.keys(dict.fromkeys(cli_utils._LEGACY_ARG_HANDLERS, "1")) == ([], [])
    assert set(table.variables) == set(env_file.env_to_args_map)
    for variable, flag in env_file.env_to_args_map.items():
        option = table.options.get(flag.removeprefix("--"))
        value = option.choices[0] if option is not None and option.later else "1"
        refused = checker.variables({variable: value})
        words = [flag if "=" in flag else f"{flag}={value}"]
        assert accepts([*needed_but(flag.removeprefix("--")), *words]) == (not refused), variable


@pytest.mark.matrix  # the child imports SimpleTuner; tests/integration/test_command_line.py uses what it hands out
def test_the_child_hands_out_the_same_table_and_keeps_it(
    table: OptionTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said: list[str] = []
    found = check_import(said.append)
    assert (found.imports, found.cause, found.table) == (True, None, table), "this very environment imports"
    assert list(Path().iterdir()) == []
    assert check_import(said.append).table == table
    assert len(said) == 1
