"""``python -m simpletuner_gh200.seams.probe``: does the installed SimpleTuner import, and what are its options?

The answer is JSON, one line. A process of its own, because the import takes as long as importing torch and every
model of SimpleTuner, and may end anyhow. Importing the trainer is nearly all that reading the options costs. Its parser
and its own functions are asked; nothing is patched for longer than a question takes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.outcome import innermost
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.importing import dataset_words, words_in
from simpletuner_gh200.upstream.option_table import TABLES, Kind, Media, ModelFamily, Option, OptionTable

TRAINER = "simpletuner.helpers.training.trainer"
"""What ``train.py`` of every release imports, and through it nearly all of SimpleTuner."""


def probe() -> dict[str, Any]:
    """``cause``: why it does not import, or None; ``options``, or ``unread``: why its options could not be read."""
    try:
        importlib.import_module(TRAINER)
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever it raises is the answer
        return {"cause": innermost(failure)}
    try:
        return {"cause": None, "options": TABLES.dump_python(read_options(), mode="json")}
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - told; a run can do without
        return {"cause": None, "unread": innermost(failure)}


# -- the options -------------------------------------------------------------------------------------------

_FLAG = re.compile(r"--([a-z][a-z0-9_]+)")
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SWITCH_WORDS = ("1", "0", "true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "none")


def read_options() -> OptionTable:
    """What SimpleTuner's parser, and what stands before it, take."""
    configuration = "simpletuner.helpers.configuration"
    cmd_args = importlib.import_module(f"{configuration}.cmd_args")
    cli_utils = importlib.import_module(f"{configuration}.cli_utils")
    env_file = importlib.import_module(f"{configuration}.env_file")
    actions = [action for action in cmd_args.get_argument_parser()._actions if action.dest != "help"]
    rewritten = set(_FLAG.findall(inspect.getsource(cmd_args.parse_cmdline_args)))
    options: dict[str, Option] = {}
    for action in actions:
        option = _option(action)
        spellings = [text.removeprefix("--") for text in action.option_strings]
        if option.choices and rewritten.intersection(spellings):
            option = _with_rewritten_values(option, cmd_args, cli_utils)
        elif option.name == "optimizer" and not option.choices:
            option = replace(option, choices=tuple(_optimizers()), later=True)
        options.update(dict.fromkeys(spellings, option))
    return OptionTable(
        importlib.metadata.version("simpletuner"),
        options,
        frozenset(_older_flags(rewritten, options, cmd_args)),
        frozenset(_other_keys(options, cli_utils)),
        {variable: flag.removeprefix("--") for variable, flag in env_file.env_to_args_map.items()},
        _switch_words(actions),
        dict(_families(options)),
        dataset_words(Path(inspect.getfile(importlib.import_module("simpletuner"))).parent),
    )


def _optimizers() -> list[str]:
    """Every optimizer that its source describes, also those that need a package or a GPU which is not here.

    A description is known by its precision; there are several tables of them, some filled in only on certain machines.
    """
    module = importlib.import_module("simpletuner.helpers.training.optimizer_param")
    tables = map(syntax.string_keys, ast.walk(ast.parse(inspect.getsource(module))))
    described = {name for table in tables for name, value in table.items() if "precision" in syntax.string_keys(value)}
    return sorted({*module.optimizer_choices, *described})


def _families(options: dict[str, Option]) -> Iterator[tuple[str, ModelFamily]]:
    """Of the families that can be named, as their classes tell; the parser has imported them all."""
    registry = importlib.import_module("simpletuner.helpers.models.registry").ModelRegistry
    choices = options["model_family"].choices if "model_family" in options else ()
    for name, found in sorted(registry.model_families().items()):
        if name not in choices:
            continue
        flavours = {str(flavour): str(weights) for flavour, weights in (found.HUGGINGFACE_PATHS or {}).items()}
        kinds = (getattr(found, "PIPELINE_CLASSES", None) or {}).values()
        pipelines = dict.fromkeys(filter(None, (getattr(kind, "__name__", "") for kind in kinds)))
        blocks = tuple(getattr(getattr(found, "MODEL_CLASS", None), "_no_split_modules", None) or ())
        bases = " ".join(base.__name__ for base in getattr(found, "__mro__", ()))
        media: Media = "audio" if "AudioModel" in bases else "video" if "VideoModel" in bases else "image"
        default = getattr(found, "DEFAULT_MODEL_FLAVOUR", None)
        yield name, ModelFamily(flavours, default, tuple(pipelines), blocks, media)


def _option(action: Any) -> Option:
    return Option(
        action.option_strings[0].removeprefix("--"),
        _kind(action),
        tuple(str(choice) for choice in action.choices or ()),
        required=bool(action.required),
        bare=action.nargs in ("?", "*", 0),
        default=action.default if isinstance(action.default, str | int | float) else None,
    )


def _kind(action: Any) -> Kind:
    kinds: dict[Any, Kind] = {int: "int", float: "float", str: "text", None: "text"}
    if action.type in kinds:
        return kinds[action.type]
    return "switch" if action.const is True and not _accepts(action.type, "a text of no meaning") else "any"


def _accepts(convert: Callable[[str], Any], text: str) -> bool:
    try:
        convert(text)
    except Exception:  # noqa: BLE001 - whatever it raises, argparse or upstream would refuse the text
        return False
    return True


def _switch_words(actions: list[Any]) -> frozenset[str]:
    switches = [action for action in actions if _kind(action) == "switch"]
    return frozenset(word for word in _SWITCH_WORDS if all(_accepts(action.type, word) for action in switches))


# -- what stands before the parser ---------------------------------------------------------------------


class _Captured(BaseException):
    """Ends a question. Not an Exception, which SimpleTuner would take for a failure of its parser."""


def _at_the_parser(cmd_args: ModuleType, words: list[str]) -> list[str]:
    """``words`` as they arrive at the parser, after SimpleTuner has rewritten some of them."""
    parser = cmd_args.get_argument_parser()

    def capture(arguments: list[str] | None = None, namespace: Any = None) -> None:
        raise _Captured(arguments)

    parser.parse_args = capture
    try:
        cmd_args.parse_cmdline_args(words)
    except _Captured as captured:
        return list(captured.args[0] or ())
    finally:
        del parser.parse_args
    return words


def _with_rewritten_values(option: Option, cmd_args: ModuleType, cli_utils: ModuleType) -> Option:
    """The option with what SimpleTuner turns into one of its choices: other letter case, and words it translates."""

    def arrives(text: str) -> bool:
        value = _at_the_parser(cmd_args, [f"--{option.name}={text}"])[0].partition("=")[2]
        return value in option.choices

    folded = all(arrives(choice.swapcase()) for choice in option.choices)
    spelt = {word for module in (cmd_args, cli_utils) for word in words_in(inspect.getsource(module))}
    words = filter(_WORD.fullmatch, spelt - set(option.choices))
    translated = sorted(word for word in words if arrives(word))
    return replace(option, choices=(*option.choices, *translated), folded=folded)


def _older_flags(rewritten: set[str], options: dict[str, Option], cmd_args: ModuleType) -> Iterator[str]:
    """Flags that the parser does not have and that SimpleTuner turns into one it has."""
    for name in sorted(rewritten - set(options)):
        if _all_known(_at_the_parser(cmd_args, [f"--{name}=true"]), options):
            yield name


def _other_keys(options: dict[str, Option], cli_utils: ModuleType) -> Iterator[str]:
    """Keys of a file that are no options and that SimpleTuner translates, or passes over."""
    registry = importlib.import_module("simpletuner.simpletuner_sdk.server.services.field_registry.registry")
    for name in sorted({*cli_utils._LEGACY_ARG_HANDLERS, *registry.field_registry._fields} - set(options)):
        if _all_known(cli_utils.mapping_to_cli_args({name: "1"}), options):
            yield name


def _all_known(words: Iterable[str], options: dict[str, Option]) -> bool:
    return all(word.removeprefix("--").partition("=")[0] in options for word in words)


def main() -> None:
    """SimpleTuner colours whatever is printed once it is imported, so the answer has a way out of its own."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        out.write(json.dumps(probe()) + "\n")


if __name__ == "__main__":
    main()
