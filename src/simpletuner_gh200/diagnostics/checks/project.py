"""GH4xx and GH108: the given training configuration: its blocks, datasets, caches and ramp, and what pins memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from simpletuner_gh200.config.allocator import PINNED_ADVICE, PINNED_KEY, split_options
from simpletuner_gh200.config.blocks import CacheSettings
from simpletuner_gh200.config.datasets import survey
from simpletuner_gh200.config.environment import ALLOCATOR
from simpletuner_gh200.config.legacy import OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.diagnostics.check import CheckResult, check, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.plan.facts import read_facts, truth
from simpletuner_gh200.plan.text import refusal
from simpletuner_gh200.ramp.outlook import outlook_of
from simpletuner_gh200.units import counted, format_bytes, gib_to_bytes
from simpletuner_gh200.upstream.option_table import Checker

_OURS = frozenset({*TRAINING_BLOCKS, *OLDER_KEYS, "datasets"})


@check("GH401", "configuration")
def configuration(context: Context) -> CheckResult:
    """A key that is misspelt, or a value out of its range, stops the run at its start."""
    training = context.given
    if training.problems:
        found = " | ".join(map(str, training.problems))
        return failed(found, f"correct them; then: gh200 config check {context.config}")
    blocks = [name for name, block in (training.settings.given_blocks if training.settings else {}).items() if block]
    datasets = counted(len(training.datasets), "dataset")
    return passed(f"{context.config}: {datasets}; blocks of ours: {', '.join(blocks) or 'none'}")


@check("GH402", "options that SimpleTuner removed")
def removed_options(context: Context) -> CheckResult:
    """Between releases options are renamed and removed; an old configuration then does less than it says."""
    # By the parser of the installed release itself, as the start of a run judges them.
    training = context.given
    table = context.simpletuner.table
    if table is None:
        return skipped("; ".join(context.simpletuner.notes))
    gone = {key: value for key, value in training.values.items() if key not in table.known(_OURS)}
    if not gone:
        return passed(f"SimpleTuner {table.version} knows every option in it")
    stopping, ignored = Checker(table, _OURS).keys(gone)
    remedy = "leave them out of the configuration, or write what they are called now"
    if stopping:
        return failed("; ".join([*map(str, stopping), *ignored]), remedy)
    return warned("; ".join(ignored), remedy)


@check("GH403", "dataset folders")
def datasets_exist(context: Context) -> CheckResult:
    """A folder that is not mounted is otherwise discovered minutes into the start of a run."""
    folders = dict(context.given.local_datasets())
    if not folders:
        return skipped("no dataset in it reads a folder of this machine")
    bad = [str(problem) for dataset in context.given.enabled() for problem in dataset.missing()]
    if bad:
        return failed("; ".join(bad), "mount the data, or correct instance_data_dir")
    return passed(f"{counted(len(folders), 'folder')} with files")


@check("GH404", "in-memory datasets against memory")
def datasets_fit(context: Context) -> CheckResult:
    """A dataset that doesn't fit is refused when the run starts; better to know beforehand."""
    wanted = [entry for entry in context.given.in_memory() if entry[1].is_dir()]
    if not wanted:
        return skipped("no in-memory dataset in it")
    sizes = {name: survey(folder, sizes=True).bytes for name, folder, _block in wanted}
    over = [
        f"{name}: {format_bytes(sizes[name])} over its memory_limit_gb of {block.memory_limit_gb:g}"
        for name, _folder, block in wanted
        if block.memory_limit_gb is not None and sizes[name] > gib_to_bytes(block.memory_limit_gb)
    ]
    if over:
        fix = "raise memory_limit_gb, or leave files out with file_extensions; compression helps captions, not JPEG"
        return failed("; ".join(over), fix)
    available, total = host_memory(context.root).available, sum(sizes.values())
    shown = f"{format_bytes(total)} of files, {format_bytes(available)} of memory available"
    if total > available:
        return failed(shown, "hold fewer datasets in memory, or use a machine or container limit with more")
    return _whole_run(context, shown)


def _whole_run(context: Context, shown: str) -> CheckResult:
    """The datasets fit by themselves: do they with everything else of the run?"""
    plan = context.plan
    if plan is None:
        return passed(shown)
    why = refusal(plan) if plan.machine.has_device else None
    if why is not None:
        fix = plan.advice.text() if plan.advice else f"see what would fit: gh200 plan {context.config}"
        return failed(f"{shown}; {why}", fix)
    needed = plan.evaluated.used("grace")
    whole = f"{shown}; {format_bytes(needed)} with everything else of the run"
    if needed > plan.machine.grace:
        return warned(whole, f"see what takes it: gh200 plan {context.config} --machine this")
    return passed(whole)


@check("GH405", "folder of the unified caches")
def cache_folder(context: Context) -> CheckResult:
    """Packs are written there while training starts; a full disk makes every later start slow again."""
    caches = context.settings.part(CacheSettings)
    if not any(caches.served().values()) or not caches.persistent_cache:
        return skipped("no persistent cache of ours in it")
    folder = Path(caches.cache_dir or Path(str(context.given.values.get("output_dir", "output")), "gh200", "cache"))
    existing = next(level for level in (folder.absolute(), *folder.absolute().parents) if level.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return failed(f"{folder}: no writing in {existing}", "set cache_config.cache_dir to a folder you may write")
    free = shutil.disk_usage(existing).free
    expected, basis = _expected(context)
    shown = f"{folder}: {format_bytes(free)} free, packs of about {format_bytes(expected)} expected ({basis})"
    if free < expected:
        return warned(shown, "free space there, or set cache_config.cache_dir to another disk")
    return passed(shown)


def _expected(context: Context) -> tuple[int, str]:
    """Bytes of the packs, and how that is known.

    They hold what SimpleTuner's own cache files hold. Where those are not there yet, the plan knows how large latents
    and embeds of this model are; the files of the dataset, images mostly, say little about it.
    """
    training = context.given
    folders = [dataset.path(key) for dataset in training.enabled() for key in ("cache_dir_vae", "cache_dir")]
    cached = sum(survey(folder, sizes=True).bytes for folder in folders if folder is not None and folder.is_dir())
    if cached:
        return cached, "as large as SimpleTuner's cache files"
    if context.plan is not None:
        return sum(row.bytes for row in context.plan.evaluated.rows if row.what == "packs"), "by gh200 plan"
    files = sum(survey(folder, sizes=True).bytes for _name, folder in training.local_datasets() if folder.is_dir())
    return files, "at most: as large as the dataset, without a model_family to plan by"


@check("GH406", "batch ramp")
def ramp_works(context: Context) -> CheckResult:
    """The effective batch grows in whole micro-batches: sizes in between are rounded."""
    _ = context.settings  # sound, or there is nothing to look at
    found = outlook_of(context.given)
    if found is None:
        return skipped("no ramp in it, or no sizes to measure it by")
    ramp = found.ramp
    if found.problems:
        fix = f"correct it, until this is content: gh200 config check {context.config}"
        return failed("; ".join(map(str, found.problems)), fix)
    if found.notices:
        return warned("; ".join(found.notices), f"see the windows: gh200 ramp {context.config}")
    sizes = f"from {ramp.initial} to {ramp.target}, in micro-batches of {ramp.unit} over all ranks"
    return passed("; ".join((sizes, *found.remarks)))


# -- SimpleTuner's own ways of keeping weights in host memory ------------------------------------------------

PINNING = ("ramtorch", "ramtorch_text_encoder", "ramtorch_vae", "ramtorch_controlnet", "musubi_blocks_to_swap")


@check("GH108", "rounding of pinned memory")
def pinned_rounding(context: Context) -> CheckResult:
    """torch rounds what it pins up to a power of two: weights kept in host memory can take half as much again."""
    torch = context.torch
    if torch is None or not torch.cuda:
        return skipped("no CUDA build of torch here")
    given = {key for name in ALLOCATOR for key, _value in split_options(context.environment.get(name, ""))}
    if PINNED_KEY in given:
        return passed(f"{PINNED_KEY} is set")
    pinning = " and ".join(_pinning(context.training) if context.training else ())
    if not torch.knows(PINNED_KEY):
        return passed(f"torch {torch.version} has no {PINNED_KEY}: it rounds every pinned tensor up to a power of two")
    if not pinning:
        return passed(f"torch {torch.version} knows {PINNED_KEY}; worth setting with RamTorch or block swapping")
    fix = f"export {ALLOCATOR[0]}={PINNED_ADVICE} (with what it holds already)"
    return warned(f"{pinning} pins weights, each rounded up to a power of two", fix)


@check("GH407", "RamTorch and gradient accumulation")
def accumulation(context: Context) -> CheckResult:
    """RamTorch hands gradients over and clears them at every micro-batch: a window's earlier ones are lost."""
    if "ramtorch" not in _pinning(context.given):
        return skipped("no RamTorch in it")
    _ = context.settings  # sound, or nothing is known of the ramp
    facts = read_facts(context.given)
    if facts.accumulation <= 1 and not facts.ramped:
        return passed("RamTorch without accumulation")
    how = "the batch ramp accumulates" if facts.ramped else f"gradient_accumulation_steps is {facts.accumulation}"
    return warned(
        f"RamTorch clears gradients at every micro-batch, and {how}: only the last one of a window would count",
        "set gradient_accumulation_steps to 1 and leave the ramp off, or go without ramtorch (use_uvm keeps optimizer "
        "state in Grace)",
    )


@check("GH408", "pinned weights of several ranks")
def copies_per_rank(context: Context) -> CheckResult:
    """RamTorch and block swapping keep pinned weights in every rank: a node with four GPUs holds four copies."""
    pinning, ranks = " and ".join(_pinning(context.given)), context.given.job.ranks
    if not pinning:
        return skipped("no RamTorch and no block swapping in it")
    if ranks <= 1:
        return passed(f"{pinning} with one rank")
    fix = "count them against the node's memory (GH305), shard the model instead (FSDP), or use one rank"
    return warned(f"{pinning} with {ranks} ranks: each pins a copy of the weights of its own", fix)


def _pinning(training: Training) -> list[str]:
    return [name for name in PINNING if truth(training.values.get(name))]
