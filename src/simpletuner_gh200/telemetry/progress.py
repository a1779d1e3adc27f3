"""Progress of long work: a bar on a terminal, a few quiet log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from simpletuner_gh200.telemetry.printable import printable
from simpletuner_gh200.units import format_bytes, format_seconds

logger = logging.getLogger("simpletuner_gh200")

LINE_EVERY_SECONDS = 15.0
"""How often work that is not on a terminal says where it is."""


class Progress(Protocol):
    """Handed to the worker; safe to call from several threads."""

    def advance(self, items: int = 1, size: int = 0) -> None:
        """So many more items are done, holding so many bytes."""


class _Counter:
    def __init__(self) -> None:
        self.items = 0
        self.size = 0
        self._lock = Lock()

    def advance(self, items: int = 1, size: int = 0) -> None:
        with self._lock:
            self.items += items
            self.size += size
        self.show()

    def show(self) -> None:
        """Overridden where there is somewhere to show it."""


class _Lines(_Counter):
    def __init__(self, label: str, items: int | None, size: int | None) -> None:
        super().__init__()
        self._label, self._items, self._size = label, items, size
        self._started = self._last = time.monotonic()

    def show(self) -> None:
        now = time.monotonic()
        if now - self._last < LINE_EVERY_SECONDS:
            return
        self._last = now
        said = describe(self.items, self.size, now - self._started, items=self._items, size=self._size)
        logger.info("gh200: %s: %s", self._label, said)


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
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield _Lines(label, items, size)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[done]}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(printable(label), total=size or items, done="")
        started = time.monotonic()

        class OnBar(_Counter):
            def show(self) -> None:
                done = describe(self.items, self.size, time.monotonic() - started, items=items, size=size)
                bar.update(task, completed=self.size if size else self.items, done=done)

        yield OnBar()
        bar.update(task, done=f"done in {format_seconds(time.monotonic() - started)}")
