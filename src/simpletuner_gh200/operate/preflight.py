"""Before a run: everything that can be known to be wrong without starting it, all of it in one message.

``gh200 config check`` and ``gh200 train`` both ask here, so that they say the same in the same words. Nothing heavy is
imported: SimpleTuner's own options come from a table that a child process made once.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import Located, find_package, flag_words, locate_training_config, take
from simpletuner_gh200.config.legacy import LEGACY_FLAG, OLDER_KEYS
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS
from simpletuner_gh200.config.settings import Settings, resolve
from simpletuner_gh200.config.training import Training, read_stock, read_training
from simpletuner_gh200.errors import ConfigError, DatasetTooLarge, FeatureUnavailable, Problem, UsageError
from simpletuner_gh200.held.settling import settle
from simpletuner_gh200.memory.ceilings import Allowance
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.operate.feasible import infeasible, missing_checkpoint
from simpletuner_gh200.operate.launching import LaunchCommand, launch_command
from simpletuner_gh200.plan.starting import pictures_of
from simpletuner_gh200.ramp.outlook import outlook_of
from simpletuner_gh200.seams.checkpoints import resumption
from simpletuner_gh200.seams.feature import all_features, decide, losses
from simpletuner_gh200.units import format_bytes, gib_to_bytes
from simpletuner_gh200.upstream.check import check_installed
from simpletuner_gh200.upstream.checkpoints import checkpoints
from simpletuner_gh200.upstream.importing import ImportVerdict, check_import
from simpletuner_gh200.upstream.option_table import Checker
from simpletuner_gh200.upstream.rules import broken_rules
from simpletuner_gh200.upstream.tested import setup_command

OLDEST = Version("3.1.0")
"""The first SimpleTuner whose seams we know."""

PLACES_KEPT = Version("4.9.3")
"""The first release in which every rank of a data-parallel run saves its place in the dataset and its randomness."""
PLACES_FOUND = Version("4.5.2")
"""Where all ranks had to save before (FSDP, DeepSpeed), the first in which each finds its own again."""

_FLAGS_OF_TRAIN = (
    *("--config", "--env", "--dry-run", "--checkpoint-on-interrupt"),
    *("--again-file", "--no-plan", "--json", "--help"),
)
_FLAGS_OF_CHECK = ("--json", "--help")
"""What the two commands take besides SimpleTuner's options."""

_OURS = frozenset({*TRAINING_BLOCKS, *OLDER_KEYS, LEGACY_FLAG, "datasets"})
"""Names that we take off a configuration before SimpleTuner looks at it."""

Say = Callable[[str], None]


ENCODED_TOGETHER = "text_encoder_batch_size"

MANY_CAPTIONS = 500
"""For which more than one at a time is worth a word."""


@dataclass(frozen=True)
class Checked:
    """A configuration that passed."""

    training: Training
    settings: Settings
    notes: tuple[str, ...] = ()
    """What a person should know, and what was not checked."""

    @cached_property
    def launch(self) -> LaunchCommand:
        """The command that would run."""
        return launch_command(self.training)


def check_run(
    *, explicit: str | None, env_name: str | None, flags: Sequence[str], say: Say, starting: bool = True
) -> Checked:
    """Installation, configuration, datasets, models, seams, checkpoints, launch.

    Before a start, or of a file that nobody is ``starting`` yet: its place among nodes may still come, and SimpleTuner
    is asked for its own rules.
    """
    own_flags = _FLAGS_OF_TRAIN if starting else _FLAGS_OF_CHECK
    checked = check_configuration(explicit=explicit, env_name=env_name, flags=flags, say=say, own_flags=own_flags)
    output = checked.training.values.get("output_dir")
    lost = settle(Path(str(output)), say) if starting and output else []  # before anybody looks for a checkpoint
    if problems := list(missing_checkpoint(checked.training)):
        raise ConfigError(problems, source=checked.training.source)
    notes = [*checked.notes, *check_seams(checked.settings), *lost, *_about_resuming(checked.training)]
    if starting and (unplaced := checked.training.job.unplaced()):
        raise unplaced
    if not starting:
        notes += _broken_rules(checked.training, say)
    return replace(checked, notes=(*notes, *checked.launch.notices))


def _broken_rules(training: Training, say: Say) -> list[str]:
    """Raises for SimpleTuner's own rules; returns what to tell. A start meets them by itself, some seconds later."""
    options = check_import(say).table
    if options is None:
        return []
    theirs = {key: value for key, value in training.values.items() if key.strip().lstrip("-") not in _OURS}
    datasets = [dataset.as_local() if dataset.in_memory else dataset.entry for dataset in training.datasets]
    problems, notes = broken_rules(theirs, datasets, training.job.ranks, options.options, say)
    if problems:
        raise ConfigError(problems, source=training.source)
    return [*notes, *captions_one_by_one(training)]


def captions_one_by_one(training: Training) -> Iterator[str]:
    """SimpleTuner's default. Ours to advise and not to set: it changes the rounding of embeds."""
    given = [training.effective, *(dataset.entry for dataset in training.datasets if ENCODED_TOGETHER in dataset.entry)]
    if any(str(entry.get(ENCODED_TOGETHER)) != "1" for entry in given):
        return
    pictures = pictures_of(training).samples
    if pictures >= MANY_CAPTIONS:
        words = f"captions of {pictures} pictures are encoded one at a time before the first step"
        yield f"{words}; {ENCODED_TOGETHER}: 16 encodes so many at once, and changes the rounding of embeds"


def check_rank(arguments: Sequence[str], say: Say) -> Checked:
    """For a rank that nobody checked before, as ``accelerate launch train.py`` starts it."""
    explicit, flags = take(list(arguments), "config")
    checked = check_configuration(explicit=explicit, env_name=None, flags=flags, say=say)
    return replace(checked, notes=(*checked.notes, *check_seams(checked.settings)))


def check_stock(*, explicit: str | None, env_name: str | None, flags: Sequence[str], say: Say) -> Checked:
    """With the kill switch on nothing of ours is looked at; the file must only be one SimpleTuner itself would read."""
    check_installation(say, trusting=True)
    located = _locate(explicit, env_name)
    if explicit is not None and located.backend != "json":
        raise UsageError(
            f"{explicit}: with SIMPLETUNER_GH200=0 SimpleTuner reads a .{located.backend} only from its own places",
            remedy="move it to config/, and leave --config out",
        )
    training = read_stock(located, os.environ, flags)
    if problems := [*training.problems, *filter(None, [training.job.missing_file()])]:
        raise ConfigError(problems, source=training.source)
    if unplaced := training.job.unplaced():
        raise unplaced
    return Checked(training, resolve({}, {}), launch_command(training).notices)


def check_configuration(
    *,
    explicit: str | None,
    env_name: str | None,
    flags: Sequence[str],
    say: Say = lambda _words: None,
    own_flags: tuple[str, ...] = _FLAGS_OF_TRAIN,
) -> Checked:
    """Find, read and validate the configuration and the dataset list; raise one error with every problem."""
    check_release()
    if explicit is not None:
        _locate(explicit, env_name)  # a named file that is not there is told at once; options may take half a minute
    options = check_import(say)
    options.stop_unless_it_imports()
    checker = Checker(options.table, _OURS, own_flags) if options.table is not None else None
    problems = checker.flags(flags) if checker is not None else []
    try:
        located = _locate(explicit, env_name)
    except UsageError:
        if problems:  # a misspelt --config is why nothing was found
            raise ConfigError(problems, source="the command line") from None
        raise
    training = read_training(located, os.environ, flags=flags, options=options.table)
    notes = [*(training.settings.notes if training.settings is not None else ()), *options.notes]
    if checker is not None and (training.values or not training.problems):
        problems += _upstreams_problems(checker, training, notes)
    told = {problem.where.lstrip("-") for problem in problems}
    problems += [problem for problem in training.problems if problem.where not in told]
    problems += [*training.missing(), *infeasible(training), *_oversized(training, notes)]
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


def _upstreams_problems(checker: Checker, training: Training, notes: list[str]) -> list[Problem]:
    """What SimpleTuner would stop at; what it goes without or drops is noted."""
    if training.located is not None and training.located.backend == "env":
        dropped: list[str] = []
        problems = checker.variables(training.written)
        problems += checker.flags(training.written.get("TRAINER_EXTRA_ARGS", "").split())
    else:
        problems, dropped = checker.keys(training.written)
    # Given is what has a value, wherever it was said: the environment counts where SimpleTuner reads variables.
    given = {flag.removeprefix("--") for flag, _value in flag_words(training.flags)}
    given |= {key for key, value in training.values.items() if value not in (None, "")}
    given |= {"data_backend_config"} if "datasets" in given else set()
    notes += dropped
    for dataset in training.enabled():
        notes += checker.dataset(dataset.where, dataset.entry, (DATASET_BLOCK,))
    return [*problems, *checker.missing(given)]


def _about_resuming(training: Training) -> Iterator[str]:
    """What the ranks will not resume from, or not well. Raises for a checkpoint that was named and is not whole."""
    asked, output = training.values.get("resume_from_checkpoint"), training.values.get("output_dir")
    if not asked or not output:
        return
    if passed_over := resumption(str(asked), Path(str(output))).notice():
        yield passed_over
    if training.job.ranks > 1 and checkpoints(Path(str(output))) and not training.values.get("ignore_final_epochs"):
        sharded = training.values.get("fsdp_enable") or training.values.get("deepspeed_config")
        if forgotten := forgotten_positions(importlib.metadata.version("simpletuner"), sharded=bool(sharded)):
            yield forgotten


def forgotten_positions(release: str, *, sharded: bool) -> str | None:
    """What to say before several ranks resume with a release that keeps the place of the first one alone.

    In older ones only the first rank of a data-parallel run saves anything; under FSDP and DeepSpeed all do, but look
    for it under another name. The others then begin their epoch anew with other random numbers, so that ranks count
    epochs differently, and one that has had all of its epochs leaves the others waiting.
    """
    mended = PLACES_FOUND if sharded else PLACES_KEPT
    try:
        if Version(release) >= mended:
            return None
    except InvalidVersion:  # a checkout's own version text
        return None
    return (
        f"SimpleTuner {release} forgets where ranks after the first were in the dataset: after a resume in the middle "
        f"of an epoch they may wait for each other without end. Use {mended} or later, or set ignore_final_epochs"
    )


def _oversized(training: Training, notes: list[str]) -> Iterator[Problem]:
    """Datasets that are to be held in memory and are over their limit, by the rules of the staging itself."""
    from simpletuner_gh200.held.listing import list_files
    from simpletuner_gh200.held.staging import check_size

    for name, folder, block in training.in_memory():
        if not folder.is_dir() or block.per_node == "shard":
            continue  # reported elsewhere; of a shard each node holds its part only
        limit, listing = block.memory_limit_gb, list_files(folder, block.file_extensions)
        available = host_memory().available
        why = f"memory_limit_gb {limit:g}" if limit is not None else "no limit"
        try:
            check_size(listing, block, Allowance(gib_to_bytes(limit) if limit is not None else 1 << 62, why))
        except DatasetTooLarge as large:
            yield Problem(f"dataset {name!r}.in_memory.memory_limit_gb", large.message, large.remedy)
            continue
        if listing.size > available and block.compression is None:
            room = f"{format_bytes(listing.size)} of files, and this machine has {format_bytes(available)} available"
            notes.append(f"dataset {name!r}: {room}")


def check_installation(say: Say, *, trusting: bool = False) -> ImportVerdict:
    """SimpleTuner is here, new enough, and imports. ``trusting``: for commands that don't import it themselves."""
    check_release()
    found = check_import(say, trusting=trusting)
    found.stop_unless_it_imports()
    return found


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
    core, blocks = verdict.features["core"], verdict.features["config"]
    why = f": {core}" if not core.on else None
    if core.on and settings.any_given and not blocks.on:
        why = f" would not pass our blocks on: {blocks}"
    if why is not None:
        remedy = "use a release that `gh200 upstream check` passes"
        raise FeatureUnavailable(f"SimpleTuner {verdict.version}{why}", remedy=remedy)
    statuses = decide(all_features(), settings, os.environ, verdict.against, release=f"SimpleTuner {verdict.version}")
    return [f"feature '{name}' is {status}" for name, status in losses(statuses).items()]
