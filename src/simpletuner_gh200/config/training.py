"""One reading of a training configuration: file, flags, older spellings, datasets, settings, and all that is wrong.

Before a run it is read from a file (``read_training``); in a rank, from what SimpleTuner parsed (``training_from``).
Both give the same settings, by the same rules, in the same words. Nothing is raised while reading: what is wrong is
collected, and whoever needs a sound configuration asks for it with ``raise_if_bad``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.allocator import carried_over
from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.config.datasets import Dataset, with_in_memory_for_all
from simpletuner_gh200.config.files import (
    LAST_RESORT,
    Located,
    UpstreamOptions,
    as_mapping,
    options_in,
    read_datasets,
    read_written,
    sourced,
)
from simpletuner_gh200.config.job import Job, read_job
from simpletuner_gh200.config.legacy import Modern, modernise
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.settings import Settings, resolve, without_effect
from simpletuner_gh200.errors import ConfigError, GH200Error, Problem


@dataclass(frozen=True)
class Training:
    """A training configuration as far as it could be read."""

    source: str
    """What messages and origins call it."""
    located: Located | None = None
    """Where it is; None in a rank."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The file with the command line's flags on top."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The file alone; the variables of a ``config.env``."""
    flags: tuple[str, ...] = ()
    """Of the command line, as they were typed."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: LAST_RESORT.defaults, repr=False)
    """SimpleTuner's own, option -> value."""
    assumed: bool = False
    """Could SimpleTuner's options not be read, so that names and defaults are those of our last resort?"""
    job: Job = field(default_factory=Job)
    """Ranks and nodes, before the run."""
    modern: Modern = field(default_factory=Modern)
    """Our blocks in today's spelling."""
    settings: Settings | None = None
    """What is in force; None where a block is not sound."""
    datasets: tuple[Dataset, ...] = ()
    block_problems: tuple[Problem, ...] = ()
    """Wrong in the file itself or in our blocks."""
    dataset_problems: tuple[Problem, ...] = ()
    """Wrong in the dataset list."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is written wrongly."""
        return (*self.block_problems, *self.dataset_problems)

    @property
    def effective(self) -> dict[str, Any]:
        """What SimpleTuner would go by: as given, and where nothing is, its default."""
        return {**self.defaults, **{key: value for key, value in self.values.items() if value not in (None, "")}}

    def missing(self) -> list[Problem]:
        """What it names and this machine does not have. SimpleTuner refuses most of it, but late."""
        found = [problem for dataset in self.enabled() for problem in dataset.missing()]
        file = self.job.missing_file()
        models, folder = _model_problems(self.values), self.values.get("output_dir")
        output = unwritable("output_dir", folder) if folder else []
        return [*models, *found, *output, *([file] if file is not None else [])]

    def raise_if_bad(self, *, here: bool = False) -> Settings:
        """The settings in force; one ConfigError with every problem, ``here`` with what this machine lacks too."""
        problems = [*self.problems, *(self.missing() if here else ())]
        if problems or self.settings is None:
            raise ConfigError(problems, source=self.source if self.located is not None else None)
        return self.settings

    def enabled(self) -> Iterator[Dataset]:
        return (dataset for dataset in self.datasets if dataset.enabled)

    def in_memory(self) -> Iterator[tuple[str, Path, InMemorySettings]]:
        """(id, folder, settings) of the datasets to be held in memory whose entries are sound."""
        for dataset in self.enabled():
            if dataset.in_memory and dataset.local_folder is not None and not dataset.problems():
                yield dataset.id, dataset.local_folder, dataset.settings()


def read_training(
    located: Located,
    environment: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    options: UpstreamOptions | None = None,
) -> Training:
    """A configuration before its run. A file that can't be read is one problem, and the only one.

    ``options``: those of the SimpleTuner that is to run; None where it can't be asked.
    """
    source = str(located.path or "command line")
    known = options or LAST_RESORT
    try:
        written = read_written(located.path) if located.path else {}
        environment = _of_the_launch(located, environment, written)
    except GH200Error as unreadable:
        return Training(source, located, block_problems=tuple(_problems_of(unreadable)))
    values = options_in(environment, known) if located.backend == "env" else written
    given = as_mapping(flags)
    problems: list[Problem] = []
    job = read_job(given, values, environment, problems)
    values = {**values, **given}
    training = Training(
        source,
        located,
        values,
        written,
        tuple(flags),
        {**LAST_RESORT.defaults, **known.defaults},
        options is None,
        job,
        modernise(values),
        block_problems=(*_misspelt_blocks(values), *problems),
    )
    return _completed(training, values.get("data_backend_config"), environment)


def read_stock(located: Located, environment: Mapping[str, str], flags: Sequence[str]) -> Training:
    """Of a run without the extension: what its launcher is told, and nothing else."""
    written = read_written(located.path) if located.path and located.backend == "env" else {}
    problems: list[Problem] = []
    job = read_job(as_mapping(flags), {}, _of_the_launch(located, environment, written), problems)
    return Training(str(located.path), located, flags=tuple(flags), job=job, block_problems=tuple(problems))


def _of_the_launch(located: Located, environment: Mapping[str, str], written: Mapping[str, Any]) -> dict[str, str]:
    """The variables that hold for a launch: this process's, above them what SimpleTuner sources, the file's own."""
    own = written if located.backend == "env" else {}
    return {**environment, **sourced(located.env_name or environment.get("ENV")), **own}


def training_from(parsed: Mapping[str, Any], given: Mapping[str, Any], environment: Mapping[str, str]) -> Training:
    """The configuration of a rank: SimpleTuner's ``parsed`` values, and what was ``given`` as ours among them.

    A dataset list that is not a file is SimpleTuner's to refuse; its own tests pass stand-ins here.
    """
    path = parsed.get("data_backend_config")
    there = isinstance(path, str | os.PathLike) and os.path.exists(path)
    training = Training("config", None, {**parsed, **given}, modern=modernise(given))
    return _completed(training, path if there else None, environment)


def _completed(training: Training, dataset_list: object, environment: Mapping[str, str]) -> Training:
    """With the datasets and the settings, and what is wrong in them."""
    modern = training.modern
    block_problems = [*training.block_problems, *modern.problems]
    dataset_problems: list[Problem] = []
    datasets = _datasets(training, dataset_list, dataset_problems)
    enabled = [dataset for dataset in datasets if dataset.enabled]
    dataset_problems += [problem for dataset in enabled for problem in dataset.problems()]
    settings: Settings | None = None
    # In a rank nothing is left to carry over: that happened before torch was imported.
    environment, carried = carried_over(environment)
    try:
        settings = resolve(modern.blocks, environment, source=training.source)
        settings = replace(
            settings,
            notes=(*modern.notes, *carried, *without_effect(settings)),
            in_memory_datasets=tuple(dataset.id for dataset in enabled if dataset.in_memory),
        )
    except ConfigError as bad:
        block_problems += bad.problems
    return replace(
        training,
        settings=settings,
        datasets=datasets,
        block_problems=tuple(block_problems),
        dataset_problems=tuple(dataset_problems),
    )


def _datasets(training: Training, path: object, problems: list[Problem]) -> tuple[Dataset, ...]:
    """The entries of the list at ``path``, or of the configuration itself."""
    inline = training.values.get("datasets")
    entries: list[dict[str, Any]] = []
    if isinstance(inline, list):
        entries = [entry for entry in inline if isinstance(entry, dict)]
        wrong = [entry for entry in inline if not isinstance(entry, dict)]
        problems += [Problem("datasets", f"{entry!r} is not an entry") for entry in wrong]
    elif path and not os.path.exists(str(path)):
        problems.append(Problem("data_backend_config", f"{path!r}: no such file", "name the dataset list"))
    elif path:
        try:
            entries = read_datasets(str(path))
        except GH200Error as unreadable:
            problems += _problems_of(unreadable)
    entries = with_in_memory_for_all(entries, training.modern.in_memory_for_all)
    family = training.values.get("model_family")
    return tuple(Dataset(entry, str(family) if family else None, training.values) for entry in entries)


def _misspelt_blocks(values: Mapping[str, Any]) -> tuple[Problem, ...]:
    """SimpleTuner silently drops a block it does not know; a near miss of ours must not vanish like that."""
    problems = []
    for key, value in values.items():
        if key in TRAINING_BLOCKS or not isinstance(value, Mapping):
            continue
        close = difflib.get_close_matches(key, TRAINING_BLOCKS, n=1, cutoff=0.8)
        if close:
            problems.append(Problem(key, "a block SimpleTuner would ignore", f"did you mean {close[0]!r}?"))
    return tuple(problems)


def _model_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Weights named by a path that is not there. What may be a name on the hub is left to SimpleTuner."""
    problems = []
    for key, value in values.items():
        if not key.endswith("_name_or_path") or not isinstance(value, str) or "{" in value:
            continue
        text = value.strip()
        # Nothing but a path begins so; models/mine may be a repository too.
        if not text.startswith(("/", "./", "../", "~", "$")) or os.path.exists(text):
            continue
        literal = text.startswith("~") or "$" in text
        remedy = (
            "SimpleTuner expands no ~ and no $: write it out" if literal else "correct the path, or name a repository"
        )
        problems.append(Problem(key, f"{text!r}: no such file or folder", remedy))
    return problems


def unwritable(where: str, folder: object) -> list[Problem]:
    """The nearest existing folder must let us write; nothing is created to find out."""
    target = Path(str(folder)).absolute()
    existing = next(place for place in (target, *target.parents) if place.exists())
    why = None if existing.is_dir() else f"{existing} is not a folder"
    if why is None and not os.access(existing, os.W_OK | os.X_OK):
        why = f"no permission to write in {existing}"
    return [] if why is None else [Problem(where, f"{str(folder)!r}: {why}", "name another folder")]


def _problems_of(error: GH200Error) -> list[Problem]:
    if isinstance(error, ConfigError):
        return list(error.problems)
    return [Problem("configuration", error.message, error.remedy)]
