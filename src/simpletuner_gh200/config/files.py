"""SimpleTuner's training configuration: where it is, its file, flags and dataset list, read as it reads them.

What has to be known of SimpleTuner's options for that, its variables and its defaults, a release tells itself
(``upstream.option_table``). Where it can't be asked, because it is not installed or does not import, there is a last
resort: what a plan looks at, as the releases that are tested have it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol

from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.errors import ConfigError, Problem, UsageError

FILE_NAMES = {"json": "config.json", "toml": "config.toml", "env": "config.env"}


class UpstreamOptions(Protocol):
    @property
    def variables(self) -> Mapping[str, str]:
        """Variable of a ``config.env`` -> the option it sets, in one case with the value: ``option=value``."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Option -> its value where nobody sets it; options without one are left out."""


@dataclass(frozen=True)
class _LastResort:
    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


LAST_RESORT: UpstreamOptions = _LastResort(
    variables={
        "ACCELERATE_CONFIG_PATH": "accelerate_config",
        "ACCELERATE_EXTRA_ARGS": "accelerate_extra_args",
        "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
        "DATALOADER_CONFIG": "data_backend_config",
        "MAX_NUM_STEPS": "max_train_steps",
        "MODEL_NAME": "pretrained_model_name_or_path",
        "NUM_EPOCHS": "num_train_epochs",
        "RESUME_CHECKPOINT": "resume_from_checkpoint",
        "TRAINING_NUM_MACHINES": "num_machines",
        "TRAINING_NUM_PROCESSES": "num_processes",
        "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
        **{
            name.upper(): name
            for name in (
                *("base_model_precision", "gradient_accumulation_steps", "mixed_precision", "model_family"),
                *("model_type", "optimizer", "output_dir", "resolution", "resolution_type", "train_batch_size"),
                "use_ema",
            )
        },
    },
    defaults={
        "base_model_precision": "no_change",
        "checkpoints_total_limit": 5,
        "ema_device": "cpu",
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "mixed_precision": "bf16",
        "model_type": "full",
        "num_train_epochs": 1,
        "optimizer": "adamw_bf16",
        "resolution": 1024,
        "resolution_type": "pixel_area",
        "train_batch_size": 4,
        "vae_batch_size": 4,
    },
)


def read_training_config(
    path: str | os.PathLike[str], environment: Mapping[str, str] | None = None, options: UpstreamOptions = LAST_RESORT
) -> dict[str, Any]:
    """The options that a JSON, TOML or ENV file sets.

    Like SimpleTuner it counts what else is in the ``environment`` as written in an ENV file.
    """
    written = read_written(path)
    if Path(path).suffix != ".env":
        return written
    return options_in({**(environment or {}), **written}, options)


def read_written(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in the file: options, leading dashes removed, or the variables of an ENV file."""
    file = Path(path)
    text = _read_text(file)
    if file.suffix == ".env":
        return _env_variables(file, text)
    try:
        mapping: Any = tomllib.loads(text) if file.suffix == ".toml" else parse_json(file, text)
    except tomllib.TOMLDecodeError as broken:
        raise ConfigError([Problem(str(file), f"not TOML: {broken}")]) from None
    if not isinstance(mapping, dict):
        raise ConfigError([Problem(str(file), f"holds a {type(mapping).__name__}, not a set of keys")])
    return {key.lstrip("-"): value for key, value in mapping.items()}


def read_datasets(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The entries of a data backend file."""
    file = Path(path)
    entries = parse_json(file, _read_text(file))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError([Problem(str(file), "is not a list of dataset entries", "write it as [{...}, {...}]")])
    return entries


def parse_json(file: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as broken:
        lines = text.splitlines() or [""]
        line = lines[min(broken.lineno, len(lines)) - 1].strip()[:80]
        where = f"{file}, line {broken.lineno}, column {broken.colno}"
        raise ConfigError([Problem(where, f"not JSON: {broken.msg}, at {line!r}")]) from None


def sourced(env_name: str | None) -> dict[str, str]:
    """SimpleTuner's CLI sources ``config/config.env`` and that of the named environment before it launches."""
    places = ["config", *([f"config/{env_name}"] if env_name and env_name != "default" else [])]
    files = [Path(place, FILE_NAMES["env"]) for place in places]
    return {name: value for file in files if file.is_file() for name, value in read_written(file).items()}


def options_in(variables: Mapping[str, str], options: UpstreamOptions) -> dict[str, str]:
    """The options that variables stand for, as SimpleTuner passes them on: what is false is left out."""
    found = {}
    for variable, option in {**{block.upper(): block for block in TRAINING_BLOCKS}, **options.variables}.items():
        name, _, fixed = option.partition("=")
        text = variables.get(variable, "")
        if text.lower() not in ("", "false"):
            found[name] = fixed or text
    return {**found, **as_mapping(variables.get("TRAINER_EXTRA_ARGS", "").split())}


def _env_variables(file: Path, text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip().removeprefix("export ").strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, separator, value = stripped.partition("=")
        if not separator:
            raise ConfigError([Problem(f"{file}, line {number}", f"no '=' in {stripped[:60]!r}")])
        try:
            words = shlex.split(value, comments=False)
        except ValueError as broken:
            raise ConfigError([Problem(f"{file}, line {number}", f"{broken} in {stripped[:60]!r}")]) from None
        name = key.strip().removesuffix("+").strip()
        more = [values[name]] if key.strip().endswith("+") and name in values else []
        values[name] = " ".join([*more, *words])
    return values


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no such file: {file}", remedy="check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder", remedy="name the file inside it") from None
    except UnicodeDecodeError as bad:
        raise ConfigError([Problem(str(file), f"not UTF-8 text: {bad.reason} at byte {bad.start}")]) from None
    except OSError as refused:
        raise UsageError(f"cannot read {file}: {refused.strerror}", remedy="check its permissions") from None


@dataclass(frozen=True)
class Located:
    """Where the training configuration is: a file, or the command line alone."""

    backend: str
    path: Path | None
    by_path: bool = False
    """Was the file named?"""
    env_name: str | None = None
    """The environment that was named."""

    @classmethod
    def at(cls, path: Path) -> Located:
        """A file that was named."""
        return cls(path.suffix.removeprefix("."), path, by_path=True)


NO_SUCH_FILE = "check the path; `gh200 init` writes a configuration, `gh200 examples DIR` those that the guides name"


def locate_training_config(
    environment: Mapping[str, str], *, explicit: str | None, env_name: str | None, examples: Path | None = None
) -> Located:
    """Find the configuration as SimpleTuner does: explicit path, named environment, then the usual places.

    ``examples`` is the folder above SimpleTuner's packaged examples.
    """
    if explicit is not None:
        path = Path(explicit)
        backend = path.suffix.removeprefix(".")
        if backend not in FILE_NAMES:
            accepted = ", ".join(f".{name}" for name in FILE_NAMES)
            raise UsageError(f"{explicit}: unknown kind of file {path.suffix!r}", remedy=f"accepted: {accepted}")
        if not path.is_file():
            raise UsageError(f"{explicit}: no such file", remedy=NO_SUCH_FILE)
        return Located.at(path)
    backend_set = _first(environment, "SIMPLETUNER_CONFIG_BACKEND", "CONFIG_BACKEND", "CONFIG_TYPE")
    if backend_set == "cmd":
        return Located("cmd", None, env_name=env_name)
    name = env_name or _first(environment, "SIMPLETUNER_ENVIRONMENT", "SIMPLETUNER_ENV", "ENV")
    tried = _candidates(environment, backend_set, name)
    if examples is not None and name and name.startswith("examples/"):
        tried += [examples / name / file for file in FILE_NAMES.values()]
    for path in tried:
        if path.is_file():
            return Located(path.suffix.removeprefix("."), path, env_name=env_name)
    raise UsageError(
        "no training configuration found; looked for " + ", ".join(str(path) for path in tried),
        remedy="name it with --config PATH, or make one with `gh200 init`",
    )


def _candidates(environment: Mapping[str, str], backend: str | None, name: str | None) -> list[Path]:
    kinds = [backend.lower()] if backend else list(FILE_NAMES)
    folders = [Path("config") / name, Path(name)] if name and name != "default" else [Path(), Path("config")]
    tried: list[Path] = []
    override = environment.get("CONFIG_PATH")
    if override:
        base = Path(override)
        tried += [base] if base.suffix else [base.with_suffix(f".{kind}") for kind in kinds]
        tried += [base / FILE_NAMES[kind] for kind in kinds if kind in FILE_NAMES]
    tried += [folder / FILE_NAMES[kind] for folder in folders for kind in kinds if kind in FILE_NAMES]
    return tried


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def find_package(name: str, search_path: Sequence[str] | None = None) -> Path | None:
    """The folder of a top-level package (or the file of a module); None if there is none.

    Without a search path it is this interpreter's own import, editable installs included.
    """
    try:
        given = search_path is not None
        spec = PathFinder.find_spec(name, list(search_path or ())) if given else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and spec.origin != "built-in" else None


# -- flags: ``--key=value``, ``--key value``, ``key=value``, ``--switch`` -----------------------------


def split_flag(flag: str) -> tuple[str, str | None]:
    """``--max_train_steps=5`` -> (``max_train_steps``, ``5``); dashes inside a name count as underscores."""
    name, separator, value = flag.lstrip("-").partition("=")
    return name.replace("-", "_"), value if separator else None


def flag_words(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag as it was typed, its value) of each flag; None where it stands alone."""
    position = 0
    while position < len(words):
        flag, separator, value = words[position].partition("=")
        text = value if separator else None
        if text is None and position + 1 < len(words) and not words[position + 1].startswith("--"):
            position += 1
            text = words[position]
        yield flag, text
        position += 1


def as_mapping(flags: Sequence[str]) -> dict[str, str]:
    """Flags as key -> text, a switch being ``true``; later ones win."""
    return {split_flag(flag)[0]: "true" if value is None else value for flag, value in flag_words(flags)}


def take(flags: Sequence[str], *names: str) -> tuple[str | None, list[str]]:
    """Remove ``--name value`` or ``--name=value`` from the flags; returns its last value and the rest."""
    found: str | None = None
    rest: list[str] = []
    position = 0
    while position < len(flags):
        name, value = split_flag(flags[position])
        if flags[position].startswith("--") and name in names:
            if value is None and position + 1 < len(flags) and not flags[position + 1].startswith("--"):
                position += 1
                value = flags[position]
            if value is None:
                raise UsageError(f"--{name} needs a value", remedy=f"write --{name}=VALUE")
            found = value
        else:
            rest.append(flags[position])
        position += 1
    return found, rest
