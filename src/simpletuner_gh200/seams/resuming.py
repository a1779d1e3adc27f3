"""Where a run goes on: never from a checkpoint that is not whole, however the run was started.

SimpleTuner takes the newest folder of its name. What is newer than the last whole one is moved aside before it looks,
by the main process of the run, which tells the other ranks what is left: their view of a shared folder may be older.
It gets a name that SimpleTuner neither resumes from nor counts nor deletes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.errors import GH200Error, RunFailed, UsageError
from simpletuner_gh200.seams.checkpoint_state import told_by_main
from simpletuner_gh200.seams.patch import Patch, wrap_method
from simpletuner_gh200.upstream.checkpoints import GUARD, checkpoints, flaw

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

ASIDE = "incomplete-"
"""Before the name of a checkpoint; SimpleTuner's begin with theirs."""

LATEST = "latest"

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class Resumption:
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
        goes_on = f"resumes from {self.start}" if self.start else "starts anew, since there is no whole one"
        unless = f". If another release wrote it whole: name it back and touch its {GUARD}" if GUARD in found else ""
        return f"{found}. It is kept aside as {kept}; this run {goes_on}{unless}"


def resumption(asked: str, output: Path) -> Resumption:
    """Decide. Raises for a checkpoint that was named and is not whole."""
    incomplete: list[tuple[Path, str]] = []
    whole = ""
    for path in reversed(checkpoints(output)):
        missing = flaw(path)
        if missing is None:
            whole = path.name
            break
        incomplete.append((path, missing))
    if asked != LATEST:
        _refuse_if_broken(asked, output, whole)
    return Resumption(whole if incomplete and asked == LATEST else asked, tuple(incomplete))


def _refuse_if_broken(asked: str, output: Path, whole: str) -> None:
    named = output / Path(asked.rstrip("/")).name  # as SimpleTuner finds it
    missing = flaw(named) if named.is_dir() and "://" not in asked else None
    if missing is not None:
        instead = f"resume from {whole}, the last whole one" if whole else "start anew without it"
        unless = f"; if all of it is there, and another release wrote it: touch {named / GUARD}"
        remedy = instead + (unless if GUARD in missing else "")
        raise UsageError(f"resume_from_checkpoint: {named} is incomplete: {missing}", remedy=remedy)


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


def _put_right(asked: str, output: Path) -> str:
    """In the main process: what to resume from, once nothing half-written is in the way."""
    try:
        found = resumption(asked, output)
    except OSError as unreadable:  # the other ranks wait for an answer
        raise RunFailed(f"the checkpoints in {output} can't be listed: {unreadable}") from unreadable
    words = found.notice()
    for path, _ in found.incomplete:
        move_aside(path)
    if words is not None:
        logger.warning("gh200: %s", words)
    return found.start


def init_resume_checkpoint(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """SimpleTuner is about to look for a checkpoint, in every rank."""

    def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        config = instance.config
        asked, output = config.resume_from_checkpoint, config.output_dir
        if asked and output:
            try:
                start = told_by_main(instance.accelerator, lambda: _put_right(str(asked), Path(output)))
            except GH200Error as failure:
                runtime.outcome.fail(failure)
                raise
            if start != asked:
                config.resume_from_checkpoint = start or None
        return wrapped(*args, **kwargs)

    return [wrap_method(module.Trainer, "init_resume_checkpoint", before)]
