"""Before a run: everything that can be known to be wrong without starting it, all of it in one message."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import Located, locate_training_config, read_datasets, read_training_config
from simpletuner_gh200.config.flags import as_mapping
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import Settings, resolve, resolve_dataset
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable, Problem, UsageError
from simpletuner_gh200.seams.configure import with_in_memory_for_all
from simpletuner_gh200.seams.decide import all_features, decide, losses
from simpletuner_gh200.upstream.check import check_installed

OLDEST = Version("3.1.0")
"""The first SimpleTuner whose seams we know."""

_READS_A_FOLDER = {"image", "video", "audio", "conditioning", "eval", "caption"}


@dataclass(frozen=True)
class Checked:
    """A configuration that passed."""

    located: Located
    config: Mapping[str, Any]
    """The file with the command line's flags on top."""
    settings: Settings


def check_configuration(*, explicit: str | None, env_name: str | None, flags: Sequence[str]) -> Checked:
    """Find, read and validate the configuration and the dataset list; raise one error with every problem."""
    located = locate_training_config(os.environ, explicit=explicit, env_name=env_name, examples=_packaged())
    config = read_training_config(located.path) if located.path else {}
    config = {**config, **as_mapping(flags)}
    modern = modernise(config)
    problems = _misspelt_blocks(config)
    in_memory: tuple[str, ...] = ()
    try:
        in_memory = _check_datasets(config, modern.in_memory_for_all)
    except ConfigError as bad:
        problems.extend(bad.problems)
    settings: Settings | None = None
    try:
        settings = resolve(
            modern.blocks,
            os.environ,
            source=str(located.path or "command line"),
            notes=tuple(modern.notes),
            in_memory_datasets=in_memory,
        )
    except ConfigError as bad:
        problems.extend(bad.problems)
    problems.extend(_output_problems(config.get("output_dir")))
    if problems or settings is None:
        raise ConfigError(problems, source=str(located.path or "command line"))
    return Checked(located, config, settings)


def check_stock(*, explicit: str | None, env_name: str | None) -> Checked:
    """With the kill switch on nothing of ours is looked at; the file must only be one SimpleTuner itself would read."""
    located = locate_training_config(os.environ, explicit=explicit, env_name=env_name, examples=_packaged())
    if explicit is not None and located.backend != "json":
        raise UsageError(
            f"{explicit}: with SIMPLETUNER_GH200=0 SimpleTuner reads a .{located.backend} only from its own places",
            remedy="move it to config/, and leave --config out",
        )
    return Checked(located, {}, resolve({}, {}))


def _packaged() -> Path | None:
    """The folder above SimpleTuner's packaged examples, found without importing it."""
    spec = importlib.util.find_spec("simpletuner")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _misspelt_blocks(config: Mapping[str, Any]) -> list[Problem]:
    """SimpleTuner drops a block it does not know without a word; a near miss of ours must not vanish like that."""
    problems = []
    for key, value in config.items():
        if key in TRAINING_BLOCKS or not isinstance(value, Mapping):
            continue
        close = difflib.get_close_matches(key, TRAINING_BLOCKS, n=1, cutoff=0.8)
        if close:
            problems.append(Problem(key, "a block SimpleTuner would ignore", f"did you mean {close[0]!r}?"))
    return problems


def check_installation() -> str:
    """SimpleTuner and what it needs are here; returns its version."""
    try:
        found = importlib.metadata.version("simpletuner")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "SimpleTuner is not installed in this environment", remedy="pip install simpletuner (see its own guide)"
        ) from None
    try:
        supported = Version(found) >= OLDEST
    except InvalidVersion:
        supported = True  # a checkout's own version text; the seams decide
    if not supported:
        raise UsageError(
            f"SimpleTuner {found} is older than {OLDEST}, the first release with the seams we need",
            remedy="pip install --upgrade simpletuner",
        )
    for package in ("accelerate", "torch"):
        if not _installed(package):
            raise UsageError(f"{package} is not installed in this environment", remedy=f"pip install {package}")
    return found


def check_seams(settings: Settings) -> list[str]:
    """Stop if a feature that was asked for can't work on this SimpleTuner; returns notices about the others."""
    verdict = check_installed()
    if not verdict.features["core"].on:
        raise FeatureUnavailable(
            f"SimpleTuner {verdict.version}: {verdict.features['core']}",
            remedy="use a release that `gh200 upstream check` passes",
        )
    if settings.any_given and not verdict.features["config"].on:
        raise FeatureUnavailable(
            f"SimpleTuner {verdict.version} would not pass our blocks on: {verdict.features['config']}",
            remedy="use a release that `gh200 upstream check` passes",
        )
    statuses = decide(all_features(), settings, os.environ, verdict.against)
    return [f"feature '{name}' is {status}" for name, status in losses(statuses).items()]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_datasets(config: Mapping[str, Any], in_memory_for_all: dict[str, Any] | None) -> tuple[str, ...]:
    """Every dataset entry: its folder exists, its ``in_memory`` block is sound. Returns the in-memory ids."""
    entries = _dataset_entries(config)
    problems: list[Problem] = []
    found: list[str] = []
    for entry in with_in_memory_for_all(entries, in_memory_for_all):
        if entry.get("disabled") or entry.get("disable"):
            continue
        name = f"dataset {entry.get('id')!r}"
        problems.extend(_folder_problems(name, entry))
        problems.extend(_in_memory_problems(name, entry))
        if entry.get("type") == "in_memory":
            found.append(str(entry.get("id")))
            try:
                resolve_dataset(entry.get("in_memory"), where=f"{name}.in_memory")
            except ConfigError as bad:
                problems.extend(bad.problems)
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _dataset_entries(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    inline = config.get("datasets")
    if isinstance(inline, list):
        wrong = [Problem("datasets", f"{entry!r} is not an entry") for entry in inline if not isinstance(entry, dict)]
        if wrong:
            raise ConfigError(wrong)
        return inline
    path = config.get("data_backend_config")
    if not path:
        return []
    if not Path(str(path)).is_file():
        raise ConfigError([Problem("data_backend_config", f"{path!r}: no such file", "name the dataset list")])
    return read_datasets(str(path))


def _folder_problems(name: str, entry: Mapping[str, Any]) -> list[Problem]:
    folder = entry.get("instance_data_dir")
    if entry.get("type", "local") not in {"local", "in_memory"} or not folder or "{" in str(folder):
        return []
    if entry.get("dataset_type", "image") in _READS_A_FOLDER and not Path(str(folder)).is_dir():
        return [Problem(f"{name}.instance_data_dir", f"{folder!r}: no such folder", "create it or correct the path")]
    return []


def _in_memory_problems(name: str, entry: Mapping[str, Any]) -> list[Problem]:
    """What was meant to hold a dataset in memory and would not."""
    kind = str(entry.get("type", "local"))
    problems = []
    if kind != "in_memory" and difflib.SequenceMatcher(None, kind, "in_memory").ratio() > 0.75:
        problems.append(Problem(f"{name}.type", f"{kind!r} is unknown", "did you mean 'in_memory'?"))
    elif kind != "in_memory" and "in_memory" in entry:
        problems.append(Problem(f"{name}.in_memory", f"has no effect on type {kind!r}", 'set "type": "in_memory"'))
    for key in entry:
        if key != "in_memory" and difflib.SequenceMatcher(None, key, "in_memory").ratio() > 0.8:
            problems.append(Problem(f"{name}.{key}", "unknown key", "did you mean 'in_memory'?"))
    if kind == "in_memory" and not entry.get("instance_data_dir") and not entry.get("cache_dir"):
        problems.append(Problem(f"{name}.instance_data_dir", "not set", "name the folder to hold in memory"))
    return problems


def _output_problems(output: object) -> list[Problem]:
    """The nearest existing folder must let us write; nothing is created to find out."""
    if not output:
        return []
    target = Path(str(output)).absolute()
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir():
        return [Problem("output_dir", f"{str(output)!r}: {existing} is not a folder", "name another folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Problem("output_dir", f"{str(output)!r}: no permission to write in {existing}", "name another folder")]
    return []
