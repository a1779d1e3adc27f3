"""The configuration under examination: read as far as it can be, each part with its own problems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.config.files import read_datasets, read_training_config
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.settings import Settings, resolve, resolve_dataset
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.seams.configure import with_in_memory_for_all


@dataclass
class Training:
    """A training configuration and its dataset list. What could not be read is in ``problems``."""

    values: Mapping[str, Any] = field(default_factory=dict)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    settings: Settings | None = None
    problems: list[str] = field(default_factory=list)

    def local_datasets(self) -> Iterator[tuple[str, Path]]:
        """(id, folder) of every enabled dataset that reads a folder of this machine."""
        for entry in self.enabled():
            folder = entry.get("instance_data_dir")
            if folder and entry.get("type", "local") in {"local", "in_memory"} and "{" not in str(folder):
                yield str(entry.get("id")), Path(str(folder)).expanduser()

    def in_memory(self) -> Iterator[tuple[str, Path, InMemorySettings]]:
        """(id, folder, settings) of the datasets to be held in memory whose block is sound."""
        folders = dict(self.local_datasets())
        for entry in self.enabled():
            name = str(entry.get("id"))
            if entry.get("type") != "in_memory" or name not in folders:
                continue
            try:
                block = resolve_dataset(entry.get("in_memory"), where=f"dataset {name!r}.in_memory")
            except GH200Error:
                continue  # said once, among the problems
            assert isinstance(block, InMemorySettings)
            yield name, folders[name], block

    def enabled(self) -> Iterator[dict[str, Any]]:
        return (entry for entry in self.datasets if not entry.get("disabled") and not entry.get("disable"))


def read_training(path: Path, environment: Mapping[str, str]) -> Training:
    """Read ``path`` and the dataset list it names; nothing is raised, everything wrong is listed."""
    training = Training()
    try:
        training.values = read_training_config(path)
    except GH200Error as unreadable:
        training.problems.append(unreadable.message)
        return training
    modern = modernise(training.values)
    try:
        entries = _entries(training.values)
        training.datasets = with_in_memory_for_all(entries, modern.in_memory_for_all)
    except GH200Error as unreadable:
        training.problems.append(unreadable.message)
    training.problems += _block_problems(training)
    ids = tuple(str(entry.get("id")) for entry in training.enabled() if entry.get("type") == "in_memory")
    try:
        training.settings = resolve(modern.blocks, environment, source=str(path), in_memory_datasets=ids)
    except GH200Error as invalid:
        training.problems.append(invalid.message)
    return training


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file():
                    total += entry.stat().st_size
    return total


def _entries(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    inline = values.get("datasets")
    if isinstance(inline, list):
        return [entry for entry in inline if isinstance(entry, dict)]
    named = values.get("data_backend_config")
    return read_datasets(str(named)) if named else []


def _block_problems(training: Training) -> list[str]:
    problems = []
    for entry in training.enabled():
        if entry.get("type") == "in_memory":
            try:
                resolve_dataset(entry.get("in_memory"), where=f"dataset {entry.get('id')!r}.in_memory")
            except GH200Error as invalid:
                problems.append(invalid.message)
    return problems
