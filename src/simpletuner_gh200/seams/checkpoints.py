"""Checkpoints of a run: our own file in them, and never going on from one that is not whole.

``gh200_state.json`` is what the extension records inside a SimpleTuner checkpoint: where the ramp is. A pre-hook of
``accelerator.save_state`` writes it, into the temporary folder and before upstream writes its manifest and guard, so
that it shares the checkpoint's fate. A pre-hook of ``load_state`` reads it, in the main process for all of them: a rank
that sees other files, or none, must not go another way. A checkpoint without it loads as if it were empty.

Of checkpoints SimpleTuner takes the newest folder of its name. What is newer than the last whole one is moved aside
before it looks, by the main process, which tells the other ranks what is left: their view of a shared folder may be
older. It gets a name that SimpleTuner neither resumes from nor counts nor deletes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from simpletuner_gh200.errors import GH200Error, RunFailed, UsageError
from simpletuner_gh200.held.settling import settle
from simpletuner_gh200.telemetry.sink import write_whole
from simpletuner_gh200.upstream.checkpoints import GUARD, checkpoints, flaw
from simpletuner_gh200.upstream.checkpoints import OURS as FILE_NAME

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")

VERSION = 1

Save = Callable[[], Mapping[str, Any]]
Load = Callable[[Mapping[str, Any] | None], None]

T = TypeVar("T")


def keep_in_checkpoints(accelerator: Any, name: str, save: Save, load: Load) -> None:
    """``save`` returns JSON-ready content; ``load`` gets it back, or None where there is none."""

    def before_save(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.is_main_process:
            write_whole(Path(output_dir, FILE_NAME), {"version": VERSION, name: dict(save())})

    def before_load(models: Any, input_dir: str) -> None:
        load(from_main_process(accelerator, lambda: read_state(Path(input_dir))).get(name))

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)


def from_main_process(accelerator: Any, ask: Callable[[], T]) -> T:
    """What ``ask`` gives in the main process, in every rank; where that or a disk fails, all fail. Collective."""
    if accelerator.num_processes == 1:
        return ask()
    from accelerate.utils import broadcast_object_list

    shared: list[Any] = [None, None]  # the answer, or why there is none
    if accelerator.is_main_process:
        try:
            shared[0] = ask()
        except GH200Error as failure:
            shared[1] = failure.message, failure.remedy
        except OSError as failure:
            shared[1] = str(failure), None
    broadcast_object_list(shared)
    answer, failed = shared
    if failed is not None:
        raise RunFailed(failed[0], remedy=failed[1])
    return cast(T, answer)


def from_every_rank(accelerator: Any, answer: T) -> list[T]:
    """What each rank gives, by their numbers, in every rank. Collective."""
    if accelerator.num_processes == 1:
        return [answer]
    from accelerate.utils import gather_object

    return cast(list[T], gather_object([answer]))


def read_state(folder: Path) -> dict[str, Any]:
    """The sections of a checkpoint; none where there is no file."""
    file = folder / FILE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise RunFailed(f"{file} is damaged: {broken}", remedy="remove the file to resume without it") from broken
    found = content.get("version") if isinstance(content, dict) else type(content).__name__
    if found != VERSION:
        raise RunFailed(
            f"{file} has version {found!r}; this release reads version {VERSION}",
            remedy="resume with the release that wrote it, or remove the file to resume without it",
        )
    return dict(content)


# -- where a run goes on ----------------------------------------------------------------------------------

ASIDE = "incomplete-"
"""Before the name of a checkpoint; SimpleTuner's begin with theirs."""

LATEST = "latest"


@dataclass(frozen=True)
class ResumedFrom:
    """From where a run goes on."""

    start: str
    """As ``resume_from_checkpoint`` is to be: what was asked for, another checkpoint's name, or nothing."""
    incomplete: tuple[tuple[Path, str], ...] = ()
    """The checkpoints beyond the last whole one, newest first, and what is missing from each."""

    def notice(self) -> str | None:
        """What to say about it, if anything."""
        if not self.incomplete:
            return None
        found = "; ".join(f"{path} is incomplete: {missing}" for path, missing in self.incomplete)
        kept = ", ".join(ASIDE + path.name for path, _ in self.incomplete)
        goes_on = f"resumes from {self.start}" if self.start else "starts from the beginning: none is complete"
        unless = f". If another release wrote it whole: name it back and touch its {GUARD}" if GUARD in found else ""
        return f"{found}. It is kept aside as {kept}; this run {goes_on}{unless}"


def resumption(requested: str, output: Path) -> ResumedFrom:
    """Decide. Raises for a checkpoint that was named and is not whole."""
    incomplete: list[tuple[Path, str]] = []
    whole = ""
    for path in reversed(checkpoints(output)):
        missing = flaw(path)
        if missing is None:
            whole = path.name
            break
        incomplete.append((path, missing))
    if requested == LATEST:
        return ResumedFrom(whole if incomplete else requested, tuple(incomplete))
    named = output / Path(requested.rstrip("/")).name  # as SimpleTuner finds it
    missing = flaw(named) if named.is_dir() and "://" not in requested else None
    if missing is not None:
        instead = f"resume from {whole}, the last whole one" if whole else "start from the beginning without it"
        unless = f"; if all of it is there, and another release wrote it: touch {named / GUARD}"
        remedy = instead + (unless if GUARD in missing else "")
        raise UsageError(f"resume_from_checkpoint: {named} is incomplete: {missing}", remedy=remedy)
    return ResumedFrom(requested, tuple(incomplete))


def move_aside(checkpoint: Path) -> Path:
    """Keep it under a name that is not SimpleTuner's, nor taken."""
    names = (ASIDE + checkpoint.name + (f"-{number}" if number else "") for number in count())
    free = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    try:
        return checkpoint.rename(free)
    except OSError as refused:
        raise RunFailed(
            f"{checkpoint} is incomplete and can't be renamed to {free.name}: {refused}",
            remedy="move it out of the output folder, or resume from another by its name",
        ) from refused


def _put_right(requested: str, output: Path) -> str:
    """In the main process: what to resume from, once nothing half-written is in the way."""
    for lost in settle(output, lambda said: logger.warning("gh200: %s", said)):
        logger.warning("gh200: %s", lost)
    try:
        found = resumption(requested, output)
    except OSError as unreadable:  # the other ranks wait for an answer
        raise RunFailed(f"the checkpoints in {output} can't be listed: {unreadable}") from unreadable
    words = found.notice()
    for path, _ in found.incomplete:
        move_aside(path)
    if words is not None:
        logger.warning("gh200: %s", words)
    return found.start


def resume_from_whole(trainer: Any, runtime: Runtime) -> None:
    """SimpleTuner is about to look for a checkpoint, in every rank."""
    config = trainer.config
    requested, output = config.resume_from_checkpoint, config.output_dir
    if not requested or not output:
        return
    accelerator = trainer.accelerator
    if accelerator.num_processes > 1 and accelerator.is_local_main_process and not accelerator.is_main_process:
        settle(Path(output), logger.debug, until=0.0)  # this node's part of what the first one waits for
    try:
        start = from_main_process(accelerator, lambda: _put_right(str(requested), Path(output)))
    except GH200Error as failure:
        runtime.outcome.fail(failure)
        raise
    if start != requested:
        config.resume_from_checkpoint = start or None
