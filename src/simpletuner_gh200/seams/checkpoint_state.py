"""``gh200_state.json``: what the extension records inside a SimpleTuner checkpoint.

Features add sections. The file is written by a pre-hook of ``accelerator.save_state``, into the temporary folder and
before upstream writes its manifest and guard, so that it shares the checkpoint's fate. It is read by a pre-hook of
``load_state``, by the main process for all of them: a rank that sees other files, or none, must not go another way. A
checkpoint without it, or without a feature's section, loads as if it were empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simpletuner_gh200.errors import GH200Error, RunFailed
from simpletuner_gh200.upstream.checkpoints import OURS as FILE_NAME

VERSION = 1

Save = Callable[[], Mapping[str, Any]]
Load = Callable[[Mapping[str, Any] | None], None]

T = TypeVar("T")

_ATTRIBUTE = "_gh200_checkpoint_state"


class CheckpointState:
    """The sections of one accelerator's checkpoints."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._sections: dict[str, tuple[Save, Load]] = {}

    @classmethod
    def of(cls, accelerator: Any) -> CheckpointState:
        """The one of this accelerator; its hooks are registered when it is first asked for."""
        found = getattr(accelerator, _ATTRIBUTE, None)
        if found is None:
            found = cls(accelerator)
            setattr(accelerator, _ATTRIBUTE, found)
            accelerator.register_save_state_pre_hook(found.before_save)
            accelerator.register_load_state_pre_hook(found.before_load)
        assert isinstance(found, cls)
        return found

    def add(self, name: str, save: Save, load: Load) -> None:
        """``save`` returns the section's JSON-ready content; ``load`` gets it back, or None where there is none."""
        self._sections[name] = (save, load)

    def before_save(self, models: Any, weights: Any, output_dir: str) -> None:
        if not self._accelerator.is_main_process:
            return
        content = {name: dict(save()) for name, (save, _) in self._sections.items()}
        write_state(Path(output_dir), content)

    def before_load(self, models: Any, input_dir: str) -> None:
        content = told_by_main(self._accelerator, lambda: read_state(Path(input_dir)))
        for name, (_, load) in self._sections.items():
            load(content.get(name))


def told_by_main(accelerator: Any, ask: Callable[[], T]) -> T:
    """What ``ask`` gives in the main process, in every rank; every rank raises what it raises there. Collective."""
    if accelerator.num_processes == 1:
        return ask()
    from accelerate.utils import broadcast_object_list

    told: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            told[0] = ask()
        except GH200Error as failure:
            told[1] = failure.message, failure.remedy
    broadcast_object_list(told)
    if told[1] is not None:
        raise RunFailed(told[1][0], remedy=told[1][1])
    answer: T = told[0]
    return answer


def write_state(folder: Path, sections: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{FILE_NAME}.{os.getpid()}"
    partial.write_text(json.dumps({"version": VERSION, **sections}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / FILE_NAME)


def read_state(folder: Path) -> dict[str, Any]:
    """The sections of a checkpoint; none where there is no file."""
    file = folder / FILE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise RunFailed(f"{file} is damaged: {broken}", remedy="remove the file to resume without it") from broken
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise RunFailed(
            f"{file} has version {found!r}; this release reads version {VERSION}",
            remedy="resume with the release that wrote it, or remove the file to resume without it",
        )
    return content
