"""GH405: can the caches be written where the configuration wants them?"""

from __future__ import annotations

import os
from pathlib import Path

from simpletuner_gh200.config.blocks import CacheSettings
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed, skipped, warned
from simpletuner_gh200.diagnostics.context import Context, folder_bytes
from simpletuner_gh200.units import format_bytes


def _run(context: Context) -> Finding:
    training = context.training
    if training is None or training.settings is None:
        return skipped("no configuration was given, or its blocks are not sound")
    caches = training.settings.part(CacheSettings)
    if not any(caches.served().values()) or not caches.persistent_cache:
        return skipped("no persistent cache of ours in it")
    folder = Path(caches.cache_dir or Path(str(training.values.get("output_dir", "output")), "gh200", "cache"))
    existing = next(level for level in (folder.absolute(), *folder.absolute().parents) if level.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return failed(f"{folder}: no writing in {existing}", "set cache_config.cache_dir to a folder you may write")
    usage = os.statvfs(existing)
    return _room(folder, usage.f_bavail * usage.f_frsize, _expected(training))


def _room(folder: Path, free: int, expected: int) -> Finding:
    shown = f"{folder}: {format_bytes(free)} free, packs of at most about {format_bytes(expected)} expected"
    if free < expected:
        return warned(shown, "free space there, or set cache_config.cache_dir to another disk")
    return passed(shown)


def _expected(training: Training) -> int:
    """Packs hold what SimpleTuner's own cache files hold: as much as those that exist, else as much as the data."""
    folders = [dataset.path(key) for dataset in training.enabled() for key in ("cache_dir_vae", "cache_dir")]
    cached = sum(folder_bytes(folder) for folder in folders if folder is not None and folder.is_dir())
    return cached or sum(folder_bytes(folder) for _name, folder in training.local_datasets() if folder.is_dir())


CHECK = Check(
    code="GH405",
    what="folder of the unified caches",
    why="Packs are written there while training starts; a full disk makes every later start slow again.",
    run=_run,
)
