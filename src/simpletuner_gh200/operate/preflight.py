"""Before a run: everything that can be known to be wrong without starting it, all of it in one message.

``gh200 config check`` and ``gh200 train`` both ask here, so that they say the same in the same words. Nothing heavy is
imported: SimpleTuner's own options come from a table that a child process made once.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import (
    Located,
    flag_words,
    locate_training_config,
    read_env_variables,
    read_training_config,
    take,
)
from simpletuner_gh200.config.legacy import LEGACY_FLAG, OLDER_KEYS
from simpletuner_gh200.config.packages import find_package
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS
from simpletuner_gh200.config.settings import Settings, resolve
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.errors import ConfigError, DatasetTooLarge, FeatureUnavailable, Problem, UsageError
from simpletuner_gh200.memory.ceilings import Allowance
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.operate import checkpoints
from simpletuner_gh200.operate.launching import LaunchCommand, launch_command, sourced
from simpletuner_gh200.ramp.preview import outlook_of
from simpletuner_gh200.seams.decide import all_features, decide, losses
from simpletuner_gh200.units import format_bytes, gib_to_bytes
from simpletuner_gh200.upstream.check import check_installed
from simpletuner_gh200.upstream.importing import ImportVerdict, check_import, trusted_import
from simpletuner_gh200.upstream.option_table import Checker
from simpletuner_gh200.upstream.versions import setup_command

OLDEST = Version("3.1.0")
"""The first SimpleTuner whose seams we know."""

_FLAGS_OF_TRAIN = (
    *("--config", "--env", "--dry-run", "--checkpoint-on-interrupt"),
    *("--again-file", "--no-plan", "--json", "--help"),
)
_FLAGS_OF_CHECK = ("--json", "--help")
"""What the two commands take besides SimpleTuner's options."""

_OURS = frozenset({*TRAINING_BLOCKS, *OLDER_KEYS, LEGACY_FLAG, "datasets"})
"""Names that we take off a configuration before SimpleTuner looks at it."""

Say = Callable[[str], None]
_FROM_ELSEWHERE = {"data_backend_config": "datasets"}
"""Option -> key of ours that stands for it."""


@dataclass(frozen=True)
class Checked:
    """A configuration that passed."""

    training: Training
    settings: Settings
    notes: tuple[str, ...] = ()
    """What a person should know, and what was not checked."""

    @property
    def located(self) -> Located:
        assert self.training.located is not None, "it was read from a file"
        return self.training.located

    @property
    def config(self) -> Mapping[str, Any]:
        """The file with the command line's flags on top."""
        return self.training.values


@dataclass(frozen=True)
class Ready:
    """Everything was checked, down to the command that would run."""

    checked: Checked
    launch: LaunchCommand

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.checked.notes, *self.launch.notices)


def check_run(*, explicit: str | None, env_name: str | None, flags: Sequence[str], say: Say) -> Ready:
    """Before a start: installation, configuration, datasets, models, seams, launch."""
    check_release()
    return _ready(explicit, env_name, flags, say, starting=True)


def check_rank(arguments: Sequence[str], say: Say) -> tuple[str, ...]:
    """For a rank that nobody checked before, as ``accelerate launch train.py`` starts it; returns what to tell."""
    explicit, flags = take(list(arguments), "config")
    check_release()
    checked = check_configuration(explicit=explicit, env_name=None, flags=flags, say=say)
    return (*checked.notes, *check_seams(checked.settings))


def check_file(path: str, flags: Sequence[str], say: Say) -> Ready:
    """The same for a file that nobody is starting yet: what flags and a machine may still bring is only noted."""
    return _ready(path, None, flags, say, starting=False)


def _ready(explicit: str | None, env_name: str | None, flags: Sequence[str], say: Say, *, starting: bool) -> Ready:
    checked = check_configuration(explicit=explicit, env_name=env_name, flags=flags, say=say, starting=starting)
    checked = replace(checked, notes=(*checked.notes, *check_seams(checked.settings)))
    if starting:
        passed_over = checkpoints.passed_over(checked.config)
        forgotten = checkpoints.forgotten_positions(
            {**checked.config, "num_processes": checked.training.job.ranks}, importlib.metadata.version("simpletuner")
        )
        checked = replace(checked, notes=(*checked.notes, *filter(None, [passed_over, forgotten])))
    launch = _launch(checked, flags, explicit=explicit, env_name=env_name)
    if starting and launch.problem is not None:
        raise launch.problem
    return Ready(checked, launch)


def check_stock(*, explicit: str | None, env_name: str | None, flags: Sequence[str], say: Say) -> Ready:
    """With the kill switch on nothing of ours is looked at; the file must only be one SimpleTuner itself would read."""
    check_installation(say, trusting=True)
    located = _locate(explicit, env_name)
    if explicit is not None and located.backend != "json":
        raise UsageError(
            f"{explicit}: with SIMPLETUNER_GH200=0 SimpleTuner reads a .{located.backend} only from its own places",
            remedy="move it to config/, and leave --config out",
        )
    checked = Checked(Training(str(located.path), located), resolve({}, {}))
    return Ready(checked, _launch(checked, flags, explicit=explicit, env_name=env_name))


def _launch(checked: Checked, flags: Sequence[str], *, explicit: str | None, env_name: str | None) -> LaunchCommand:
    return launch_command(
        checked.located, flags, os.environ, explicit=explicit is not None, env_name=env_name, config=checked.config
    )


def check_configuration(
    *,
    explicit: str | None,
    env_name: str | None,
    flags: Sequence[str],
    say: Say = lambda _words: None,
    starting: bool = True,
) -> Checked:
    """Find, read and validate the configuration and the dataset list; raise one error with every problem."""
    if explicit is not None:
        _locate(explicit, env_name)  # a named file that is not there is told at once; options may take half a minute
    options = check_import(say)
    options.stop_unless_it_imports()
    own = _FLAGS_OF_TRAIN if starting else _FLAGS_OF_CHECK
    checker = Checker(options.table, _OURS, own) if options.table is not None else None
    problems = checker.flags(flags) if checker is not None else []
    try:
        located = _locate(explicit, env_name)
    except UsageError:
        if problems:  # a misspelt --config is why nothing was found
            raise ConfigError(problems, source="the command line") from None
        raise
    environment = {**os.environ, **sourced(env_name or os.environ.get("ENV"))}
    training = read_training(located, environment, flags=flags, options=options.table)
    notes = [*(training.settings.notes if training.settings is not None else ()), *options.notes]
    if checker is not None and (training.values or not training.problems):
        written = _written(checker, located, training, flags)
        problems += [*written.problems, *(written.missing if starting else ())]
        notes += [*written.notes, *(() if starting else map(str, written.missing))]
        notes += [
            note for each in training.enabled() for note in checker.dataset(each.where, each.entry, (DATASET_BLOCK,))
        ]
    told = {problem.where.lstrip("-") for problem in problems}
    problems += [problem for problem in training.problems if problem.where not in told]
    problems += [*training.missing(), *_oversized(training, notes)]
    ramp = outlook_of(training)
    if ramp is not None:
        problems += ramp.problems
        notes += [f"ramp: {notice}" for notice in (*ramp.remarks, *ramp.notices)]
    if problems:
        raise ConfigError(problems, source=training.source)
    return Checked(training, training.raise_if_bad(), tuple(notes))


def _locate(explicit: str | None, env_name: str | None) -> Located:
    return locate_training_config(
        os.environ, explicit=explicit, env_name=env_name, examples=find_package("simpletuner")
    )


@dataclass(frozen=True)
class _Written:
    """What SimpleTuner would make of a file: stops at, goes without, drops."""

    problems: list[Problem]
    missing: list[Problem]
    notes: list[str]


def _written(checker: Checker, located: Located, training: Training, flags: Sequence[str]) -> _Written:
    """Given is what has a value, wherever it was said: the environment counts where SimpleTuner reads variables."""
    given = {flag.removeprefix("--") for flag, _value in flag_words(flags)}
    given |= {key for key, value in training.values.items() if value not in (None, "")}
    problems: list[Problem] = []
    notes: list[str] = []
    if located.path is not None and located.backend == "env":
        variables = read_env_variables(located.path)
        problems, notes = checker.variables(variables)
        problems += checker.flags(variables.get("TRAINER_EXTRA_ARGS", "").split())
    elif located.path is not None:
        problems, notes = checker.keys(read_training_config(located.path))
    given |= {option for option, key in _FROM_ELSEWHERE.items() if key in given}
    return _Written(problems, checker.missing(given), notes)


def _oversized(training: Training, notes: list[str]) -> Iterator[Problem]:
    """Datasets that are to be held in memory and are over their limit, by the rules of the staging itself."""
    from simpletuner_gh200.store.staging import check_size, request_for

    for name, folder, block in training.in_memory():
        if not folder.is_dir() or block.per_node == "shard":
            continue  # reported elsewhere; of a shard each node holds its part only
        request, limit = request_for(folder, block), block.memory_limit_gb
        available = host_memory().available
        why = f"memory_limit_gb {limit:g}" if limit is not None else "no limit"
        try:
            size = check_size(request, Allowance(gib_to_bytes(limit) if limit is not None else 1 << 62, why))
        except DatasetTooLarge as large:
            yield Problem(f"dataset {name!r}.in_memory.memory_limit_gb", large.message, large.remedy)
            continue
        if size > available and block.compression is None:
            room = f"{format_bytes(size)} of files, and this machine has {format_bytes(available)} available"
            notes.append(f"dataset {name!r}: {room}")


def check_installation(say: Say, *, trusting: bool = False) -> None:
    """SimpleTuner is here, new enough, and imports. ``trusting``: for commands that don't import it themselves."""
    check_release()
    (trusted_import if trusting else check_import)(say).stop_unless_it_imports()


def check_release() -> None:
    """SimpleTuner is here and new enough. That it imports is asked with its options."""
    try:
        found = importlib.metadata.version("simpletuner")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(ImportVerdict(False).in_a_line()) from None
    try:
        supported = Version(found) >= OLDEST
    except InvalidVersion:
        supported = True  # a checkout's own version text; the seams decide
    if not supported:
        raise UsageError(
            f"SimpleTuner {found} is older than {OLDEST}, the first release with the seams we need",
            remedy=f"`{setup_command()}` installs one that was tested",
        )


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
    statuses = decide(all_features(), settings, os.environ, verdict.against, release=f"SimpleTuner {verdict.version}")
    return [f"feature '{name}' is {status}" for name, status in losses(statuses).items()]
