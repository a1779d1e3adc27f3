from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.commands import Command
from tests.chaos.laboratory import Laboratory

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A trial that trains is a real run, and can depend on the release."""
    for item in items:
        if item.path.is_relative_to(HERE) and "train" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.releases)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start ``gh200 ...``; nothing of it outlives the trial."""
    started: list[Command] = []

    def begin(*arguments: str | Path, **options: Any) -> Command:
        folder = options.pop("folder", tmp_path)
        started.append(Command(*arguments, folder=folder, **options))
        return started[-1]

    yield begin
    for command in started:
        command.clear_away()


@pytest.fixture(scope="session")
def _laboratory(forge: Any, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(forge, tmp_path_factory.mktemp("laboratory"))


@pytest.fixture
def laboratory(_laboratory: Laboratory) -> Laboratory:
    """SimpleTuner's own caches are filled; no run with the extension has been."""
    _laboratory.put_back()
    return _laboratory


@pytest.fixture
def packed(_laboratory: Laboratory) -> Laboratory:
    """There are packs of an undisturbed run, and what that run trained."""
    _laboratory.put_packs_back()
    return _laboratory


@pytest.fixture
def train(start: Callable[..., Command]) -> Callable[..., Command]:
    """Start ``gh200 train`` on the laboratory's project."""

    def begin(laboratory: Laboratory, *flags: str, **options: Any) -> Command:
        return start("train", "--config", laboratory.project.config, *flags, **options)

    return begin
