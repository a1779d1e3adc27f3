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
        done = f"{self.items}" + (f"/{self._items}" if self._items is not None else "")
        speed = self.size / (now - self._started)
        of = f" of {format_bytes(self._size)}" if self._size else ""
        logger.info("gh200: %s: %s, %s%s, %s/s", self._label, done, format_bytes(self.size), of, format_bytes(speed))


@contextmanager
def progress(label: str, *, items: int | None = None, size: int | None = None) -> Iterator[Progress]:
    """Show the progress of ``label`` while the block runs; ``items`` and ``size`` are the totals, where known."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Lines(label, items, size)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[done]}", markup=False),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(printable(label), total=size or items, done="")
        started = time.monotonic()

        class OnBar(_Counter):
            def show(self) -> None:
                speed = self.size / max(time.monotonic() - started, 1e-6)
                count = f"{self.items}" + (f"/{items}" if items is not None else "")
                done = f"{count}  {format_bytes(self.size)}  {format_bytes(speed)}/s"
                bar.update(task, completed=self.size if size else self.items, done=done)

        yield OnBar()
        bar.update(task, done=f"done in {format_seconds(time.monotonic() - started)}")
