"""Checkpoints that somebody left in memory: on the disk, or cleared, before anybody looks for them.

The launcher at its end and every start ask for it. What a dead run left in this memory is copied to its place. What
comes from a memory that can't be seen from here, another node's or another container's, is waited for while its copy
grows.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.held.saved import (
    DRAFT,
    DRAINER,
    MOST_STARTS,
    OWNER,
    MemoryFolder,
    Order,
    beside,
    disclaim,
    memories,
    memory_folders,
)

_NAME = re.compile(
    rf"{re.escape(DRAFT)}(checkpoint-\d+(?:-rolling)?)-((.+)-([\da-f]+\.[\da-f]+)-(\d+-\d+))(?:\.old|\.part\d+(?:\.\d+)?)?"
)

QUIET = 60.0
"""Seconds without a sign of life after which nobody is at another memory's draft any more."""

_FORSAKEN = 3600.0
"""As many by the clock, of which two nodes may not agree to the minute: then it is not even watched."""


@dataclass(frozen=True)
class Draft:
    """A checkpoint on its way, by the name of its draft."""

    path: Path
    name: str
    run: str
    node: str
    memory: str
    owner: str


def settle(output: Path, say: Callable[[str], None], *, until: float | None = None) -> list[str]:
    """Before anybody looks for checkpoints in ``output``.

    Other folders' checkpoints are seen to as well, and not waited for. ``until`` (by the clock) the disk is waited for,
    for ever if not said. Returns what is not on the disk after all, in words.
    """
    lost = []
    for folder in memory_folders():
        if folder.locked(OWNER):
            continue
        order = folder.order()
        if order is None and not folder.locked(DRAINER):
            folder.remove()
        elif order is not None:
            if not folder.locked(DRAINER):
                folder.start_drainer()
            if os.path.realpath(Path(order.target).parent) == os.path.realpath(output):
                lost += _see_through(folder, order, say, until)
    for draft in drafts(output):
        lost += _of_elsewhere(draft, say, until)
    return lost


def _see_through(folder: MemoryFolder, order: Order, say: Callable[[str], None], until: float | None) -> list[str]:
    """Of a run that is gone, until the disk has it."""
    said = "it is in memory alone, and is being written"
    say(f"{order.target}: {said}")
    starts = 0
    while folder.order() == order:
        if until is not None and time.time() > until:
            return [f"{order.target} is not on disk yet; that goes on in the background"]
        told = folder.told()
        if told is not None and told.failing not in (None, said):
            said = str(told.failing)
            say(f"{order.target} can't be written, and is tried again: {said}")
        time.sleep(0.05)
        if not folder.locked(DRAINER) and folder.order() == order:  # somebody has killed it, or it has yet to begin
            starts += 1
            if starts > MOST_STARTS:
                return [f"{order.target} stays in {folder.path}: the process that copies it ends at once"]
            folder.start_drainer().wait()
    told = folder.told()
    folder.remove()
    return [f"{order.target} was given up: {told.failing}"] if told is not None and told.given_up else []


# -- drafts on the disk ------------------------------------------------------------------------------------


def drafts(output: Path) -> list[Draft]:
    """Each once, whatever there is of it: the draft itself, lists of its parts, or the older one that it replaces."""
    found = {match.groups() for path in output.glob(f"{DRAFT}*") if (match := _NAME.fullmatch(path.name))}
    return [Draft(output / f"{DRAFT}{name}-{run}", name, run, *place) for name, run, *place in sorted(found)]


def _of_elsewhere(draft: Draft, say: Callable[[str], None], until: float | None) -> list[str]:
    """A draft in whose memory nobody here has looked: of a node that was started anew, or of one that can't be seen."""
    if draft.owner in {folder.owner for folder in memory_folders()}:
        return []
    if draft.memory not in memories():
        followed = _follow(draft, say, until)
        if followed is not None:
            return followed
    goes = draft.path.is_dir()
    if goes:  # before it is cleared: a writer that only stood still begins no other
        disclaim(draft.path.parent, draft.run)
    _clear(draft)
    whose = f"{draft.name} was on its way from the memory of {draft.node}"
    return [f"{whose}, and its writer is gone: its partial copy on disk is deleted"] if goes else []


def _follow(draft: Draft, say: Callable[[str], None], until: float | None) -> list[str] | None:
    """Until it has its name, or time is up; None where nobody is at it."""
    seen, since, said = None, time.monotonic(), False
    while (signs := _signs(draft.path)) is not None:
        if seen is None and time.time() - signs[0] > _FORSAKEN:
            return None
        if signs != seen:
            seen, since = signs, time.monotonic()
        if time.monotonic() - since > QUIET:
            return None
        if until is not None and time.time() > until:
            return [f"{draft.name} is not on disk yet: it comes from the memory of {draft.node}"]
        if not said:
            say(f"{draft.name} is being written from the memory of {draft.node}: waiting for it")
            said = True
        time.sleep(0.2)
    return [] if said else None


def _signs(draft: Path) -> tuple[float, int] | None:
    """That somebody writes to it: the latest time and how much there is. None where it is gone."""
    try:
        found = [path.stat() for path in (draft, *draft.rglob("*"))]
    except FileNotFoundError:
        return None
    return max(each.st_mtime for each in found), sum(each.st_size for each in found)


def _clear(draft: Draft) -> None:
    older = beside(draft.path, "old")
    target = draft.path.with_name(draft.name)
    if older.exists() and not target.exists():  # its successor never got there
        with suppress(OSError):  # it stays as it is
            older.rename(target)
    for path in (draft.path, older):
        shutil.rmtree(path, ignore_errors=True)
    for path in draft.path.parent.glob(f"{draft.path.name}.part*"):
        path.unlink(missing_ok=True)
