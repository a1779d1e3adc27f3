"""``gh200_state.json`` beside upstream's own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.seams.checkpoints import CheckpointState, read_state
from simpletuner_gh200.upstream.checkpoints import OURS as FILE_NAME


class Hooks:
    num_processes = 1
    """The two registrations of an accelerator."""

    def __init__(self, *, main: bool = True) -> None:
        self.is_main_process = main
        self.save: list[Callable[..., None]] = []
        self.load: list[Callable[..., None]] = []

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
        self.save.append(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> None:
        self.load.append(hook)


def test_sections_come_back_and_hooks_are_registered_once(tmp_path: Path) -> None:
    hooks, seen = Hooks(), {}

    def remember(name: str) -> Callable[[Mapping[str, Any] | None], None]:
        return lambda section: seen.update({name: section})

    CheckpointState.of(hooks).add("ramp", lambda: {"step": 3}, remember("ramp"))
    CheckpointState.of(hooks).add("cache", dict, remember("cache"))
    (save,), (load,) = hooks.save, hooks.load
    save([], [], str(tmp_path))
    load([], str(tmp_path))
    assert seen == {"ramp": {"step": 3}, "cache": {}}
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"version": 1, "ramp": {"step": 3}, "cache": {}}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    hooks = Hooks(main=False)
    CheckpointState.of(hooks).add("ramp", lambda: {"step": 3}, lambda section: None)
    hooks.save[0]([], [], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_the_file_loads_as_empty(tmp_path: Path) -> None:
    hooks, seen = Hooks(), []
    CheckpointState.of(hooks).add("ramp", dict, seen.append)
    hooks.load[0]([], str(tmp_path))
    assert seen == [None]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99}'])
def test_a_damaged_or_newer_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(RunFailed, match=FILE_NAME):
        read_state(tmp_path)
