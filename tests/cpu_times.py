"""What each test costs: ``GH200_TEST_CPU=file pytest ...`` writes its CPU seconds there, its processes' included.

Wall time says little where two environments share the machine's cores; this is what `make test` is held small by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Not in the pytest that a test starts on the emulated driver: what it costs is that test's.
FILE = None if os.environ.get("GH200_EMULATED") else os.environ.get("GH200_TEST_CPU")


def spent() -> float:
    """By this process and its family, living and gone."""
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    return sum(sum(times[:4]) for member in family if (times := times_of(member)))


def times_of(process: psutil.Process) -> tuple[float, ...]:
    """User and system time, own and of children that were waited for; nothing of one that has just ended."""
    try:
        return tuple(process.cpu_times())
    except psutil.NoSuchProcess:
        return ()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = spent() if FILE else 0.0
    result = yield
    if FILE:
        note(spent() - before, item.nodeid)
    return result


def pytest_sessionfinish() -> None:
    if FILE:
        note(spent(), "everything, with collection")


def note(cost: float, what: str) -> None:
    with Path(FILE or os.devnull).open("a") as file:
        file.write(f"{cost:8.2f} {what}\n")
