"""``gh200_state.json`` beside upstream's own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.seams.checkpoints import from_main_process, keep_in_checkpoints, read_state
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


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    hooks, seen = Hooks(), []
    keep_in_checkpoints(hooks, "ramp", lambda: {"step": 3}, seen.append)
    (save,), (load,) = hooks.save, hooks.load
    load([], str(tmp_path))
    save([], [], str(tmp_path))
    load([], str(tmp_path))
    assert seen == [None, {"step": 3}], "a checkpoint without the file loads as empty"
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"version": 1, "ramp": {"step": 3}}


@pytest.mark.parametrize("failure", [RunFailed("damaged"), PermissionError(13, "damaged")], ids=["ours", "a disk's"])
def test_what_fails_in_the_main_process_is_told_to_the_ranks_that_wait(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        raise failure

    told: list[list[object]] = []
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", told.append)
    ranks = Hooks()
    ranks.num_processes = 2
    with pytest.raises(RunFailed, match="damaged"):
        from_main_process(ranks, ask)
    assert told == [[None, (str(failure), None)]]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    hooks = Hooks(main=False)
    keep_in_checkpoints(hooks, "ramp", lambda: {"step": 3}, lambda section: None)
    hooks.save[0]([], [], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99}'])
def test_a_damaged_or_newer_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(RunFailed, match=FILE_NAME):
        read_state(tmp_path)
