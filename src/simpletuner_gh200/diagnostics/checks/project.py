"""GH4xx: the given training configuration: its blocks, its datasets, its caches, its ramp."""

from __future__ import annotations

import os
from pathlib import Path

from simpletuner_gh200.config.blocks import CacheSettings
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context, folder_bytes
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.plan.machines import this_machine
from simpletuner_gh200.plan.planning import quick_plan
from simpletuner_gh200.plan.text import refusal
from simpletuner_gh200.ramp.outlook import outlook_of
from simpletuner_gh200.units import counted, format_bytes, gib_to_bytes
from simpletuner_gh200.upstream.option_table import Checker

_OURS = frozenset({*TRAINING_BLOCKS, *OLDER_KEYS, "datasets"})


def configuration(context: Context) -> Finding:
    training = context.training
    if training is None:
        return skipped("no configuration was given")
    if training.problems:
        found = " | ".join(map(str, training.problems))
        return failed(found, f"correct them; then: gh200 config check {context.config}")
    blocks = [name for name, block in (training.settings.given_blocks if training.settings else {}).items() if block]
    return passed(
        f"{context.config}: {counted(len(training.datasets), 'dataset')}; blocks of ours: {', '.join(blocks) or 'none'}"
    )


def removed_options(context: Context) -> Finding:
    """By the parser of the installed release itself, as the start of a run judges them."""
    if context.training is None:
        return skipped("no configuration was given")
    table = context.simpletuner.table
    if table is None:
        return skipped("; ".join(context.simpletuner.notes))
    gone = {key: value for key, value in context.training.values.items() if key not in table.known(_OURS)}
    if not gone:
        return passed(f"SimpleTuner {table.version} knows every option in it")
    stopping, ignored = Checker(table, _OURS).keys(gone)
    remedy = "leave them out of the configuration, or write what they are called now"
    if stopping:
        return failed("; ".join([*map(str, stopping), *ignored]), remedy)
    return warned("; ".join(ignored), remedy)


def datasets_exist(context: Context) -> Finding:
    if context.training is None:
        return skipped("no configuration was given")
    folders = dict(context.training.local_datasets())
    if not folders:
        return skipped("no dataset in it reads a folder of this machine")
    bad = [str(problem) for dataset in context.training.enabled() for problem in dataset.missing()]
    if bad:
        return failed("; ".join(bad), "mount the data, or correct instance_data_dir")
    return passed(f"{counted(len(folders), 'folder')} with files")


def datasets_fit(context: Context) -> Finding:
    if context.training is None:
        return skipped("no configuration was given")
    wanted = [entry for entry in context.training.in_memory() if entry[1].is_dir()]
    if not wanted:
        return skipped("no in-memory dataset in it")
    sizes = {name: folder_bytes(folder) for name, folder, _block in wanted}
    over = [
        f"{name}: {format_bytes(sizes[name])} over its memory_limit_gb of {block.memory_limit_gb:g}"
        for name, _folder, block in wanted
        if block.memory_limit_gb is not None and sizes[name] > gib_to_bytes(block.memory_limit_gb)
    ]
    if over:
        return failed(
            "; ".join(over),
            "raise memory_limit_gb, or leave files out with file_extensions; compression helps captions, not JPEG",
        )
    available, total = host_memory(context.root).available, sum(sizes.values())
    shown = f"{format_bytes(total)} of files, {format_bytes(available)} of memory available"
    if total > available:
        return failed(shown, "hold fewer datasets in memory, or use a machine or container limit with more")
    return _whole_run(context, context.training, shown)


def _whole_run(context: Context, training: Training, shown: str) -> Finding:
    """The datasets fit by themselves: do they beside everything else of the run?"""
    if not training.values.get("model_family") or training.problems:
        return passed(shown)
    machine = this_machine(
        output=str(training.values.get("output_dir") or "."), driver=context.driver, root=context.root
    )
    plan = quick_plan(training, machine)
    why = refusal(plan) if machine.has_device else None
    if why is not None:
        advice = plan.advice
        return failed(
            f"{shown}; {why}", advice.text() if advice else f"see what would fit: gh200 plan {context.config}"
        )
    needed, there = plan.table.used("grace"), machine.capacity("grace")
    whole = f"{shown}; {format_bytes(needed)} with everything else of the run"
    if there is not None and needed > there:
        return warned(whole, f"see what takes it: gh200 plan {context.config} --machine this")
    return passed(whole)


def cache_folder(context: Context) -> Finding:
    training = context.training
    if training is None or training.settings is None:
        return skipped("no configuration was given, or its blocks have errors")
    caches = training.settings.part(CacheSettings)
    if not any(caches.served().values()) or not caches.persistent_cache:
        return skipped("no persistent cache of ours in it")
    folder = Path(caches.cache_dir or Path(str(training.values.get("output_dir", "output")), "gh200", "cache"))
    existing = next(level for level in (folder.absolute(), *folder.absolute().parents) if level.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return failed(f"{folder}: no writing in {existing}", "set cache_config.cache_dir to a folder you may write")
    usage = os.statvfs(existing)
    return _room(folder, usage.f_bavail * usage.f_frsize, *_expected(context, training))


def _room(folder: Path, free: int, expected: int, basis: str) -> Finding:
    shown = f"{folder}: {format_bytes(free)} free, packs of about {format_bytes(expected)} expected ({basis})"
    if free < expected:
        return warned(shown, "free space there, or set cache_config.cache_dir to another disk")
    return passed(shown)


def _expected(context: Context, training: Training) -> tuple[int, str]:
    """Bytes of the packs, and how that is known.

    They hold what SimpleTuner's own cache files hold. Where those are not there yet, the plan knows how large latents
    and embeds of this model are; the files of the dataset, images mostly, say little about it.
    """
    folders = [dataset.path(key) for dataset in training.enabled() for key in ("cache_dir_vae", "cache_dir")]
    cached = sum(folder_bytes(folder) for folder in folders if folder is not None and folder.is_dir())
    if cached:
        return cached, "as large as SimpleTuner's cache files"
    if training.values.get("model_family") and not training.problems:
        table = quick_plan(training, this_machine(driver=context.driver, root=context.root)).table
        return sum(row.bytes for row in table.rows if row.what == "packs"), "by gh200 plan"
    files = sum(folder_bytes(folder) for _name, folder in training.local_datasets() if folder.is_dir())
    return files, "at most: as large as the dataset, without a model_family to plan by"


def ramp_works(context: Context) -> Finding:
    training = context.training
    if training is None or training.settings is None:
        return skipped("no configuration was given, or its blocks have errors")
    found = outlook_of(training)
    if found is None:
        return skipped("no ramp in it, or no sizes to measure it by")
    ramp = found.ramp
    if found.problems:
        return failed(
            "; ".join(map(str, found.problems)),
            f"correct it, until this is content: gh200 config check {context.config}",
        )
    if found.notices:
        return warned("; ".join(found.notices), f"see the windows: gh200 ramp {context.config}")
    told = f"from {ramp.initial} to {ramp.target}, in micro-batches of {ramp.unit} over all ranks"
    return passed("; ".join((told, *found.remarks)))


CHECKS = (
    Check(
        code="GH401",
        what="configuration",
        why="A key that is misspelt, or a value out of its range, stops the run at its start.",
        run=configuration,
    ),
    Check(
        code="GH402",
        what="options that SimpleTuner removed",
        why="Between releases options are renamed and removed; an old configuration then does less than it says.",
        run=removed_options,
    ),
    Check(
        code="GH403",
        what="dataset folders",
        why="A folder that is not mounted is otherwise discovered minutes into the start of a run.",
        run=datasets_exist,
    ),
    Check(
        code="GH404",
        what="in-memory datasets against memory",
        why="A dataset that doesn't fit is refused when the run starts; better to know beforehand.",
        run=datasets_fit,
    ),
    Check(
        code="GH405",
        what="folder of the unified caches",
        why="Packs are written there while training starts; a full disk makes every later start slow again.",
        run=cache_folder,
    ),
    Check(
        code="GH406",
        what="batch ramp",
        why="The effective batch grows in whole micro-batches: sizes in between are rounded.",
        run=ramp_works,
    ),
)
