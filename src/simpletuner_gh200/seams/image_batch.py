"""Loading many images at once: in order, on the machine's cores, errors kept apart for the caller to judge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Outcome = tuple[str, Any, Exception | None]


def read_in_parallel(read: Callable[[str, bool], Any], paths: list[str], delete: bool) -> Iterator[Outcome]:
    """(path, image or None, error or None) for each path, in the order given."""

    def one(path: str) -> Outcome:
        try:
            return path, read(path, delete), None
        except Exception as error:  # noqa: BLE001 - handed to the caller, who decides as upstream does
            return path, None, error

    threads = min(len(os.sched_getaffinity(0)), len(paths))
    if threads <= 1:
        yield from map(one, paths)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="gh200-decode") as pool:
        yield from pool.map(one, paths)
