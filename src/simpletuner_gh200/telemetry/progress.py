"""Progress of long work: a bar on a terminal, a few quiet log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from simpletuner_gh200.telemetry.redact import printable
from simpletuner_gh200.units import format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

LINE_EVERY_SECONDS = 15.0
"""How often work that is not on a terminal says where it is."""


class Progress:
    """Handed to the worker; safe to call from several threads."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        """``show`` gets the items and the bytes that are done."""
        self._show = show
        self._items = self._size = 0
        self._lock = Lock()

    def advance(self, items: int = 1, size: int = 0) -> None:
        """So many more items are done, holding so many bytes."""
        with self._lock:
            self._items += items
            self._size += size
        self._show(self._items, self._size)


def describe(done: int, done_size: int, seconds: float, *, items: int | None, size: int | None) -> str:
    """Entries, bytes, rate, and what remains at that rate, as far as the totals are known."""
    seconds = max(seconds, 1e-6)
    count = f"{done}" + (f"/{items}" if items is not None else "")
    amount = format_bytes(done_size) + (f" of {format_bytes(size)}" if size else "")
    text = f"{count}, {amount}, {done / seconds:.0f}/s, {format_bytes(done_size / seconds)}/s"
    # By bytes where they are known: entries may differ in size a hundredfold.
    whole, part = (size, done_size) if size and done_size else (items, done)
    if whole and part:
        text += f", {format_seconds(seconds * max(whole - part, 0) / part)} remaining"
    return text


@contextmanager
def progress(
    label: str, *, items: int | None = None, size: int | None = None, quiet: bool = False
) -> Iterator[Progress]:
    """Show the progress of ``label`` while the block runs; ``items`` and ``size`` are the totals, where known.

    ``quiet``: in lines of the log even on a terminal, where training has a bar of its own.
    """
    started = shown_at = time.monotonic()

    def words(done: int, done_size: int) -> str:
        return describe(done, done_size, time.monotonic() - started, items=items, size=size)

    def line(done: int, done_size: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= LINE_EVERY_SECONDS:
            shown_at = time.monotonic()
            logger.info("gh200: %s: %s", label, words(done, done_size))

    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield Progress(line)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[done]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(printable(label), total=size or items, done="")
        yield Progress(lambda done, held: bars.update(task, completed=held if size else done, done=words(done, held)))
        bars.update(task, done=f"done in {format_seconds(time.monotonic() - started)}")
