"""What each test costs: ``GH200_TEST_CPU=file pytest ...`` writes its CPU seconds, its processes' included, largest first.

Wall time says little where two environments share the machine's cores; this is what `make test` is held small by.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FILE = os.environ.get("GH200_TEST_CPU")
seconds: Counter[str] = Counter()


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
        seconds[item.nodeid] += spent() - before
    return result


def pytest_sessionfinish() -> None:
    if FILE and not os.environ.get("GH200_EMULATED"):
        lines = [f"{cost:8.2f} {test}" for test, cost in seconds.most_common()]
        Path(FILE).write_text("\n".join([f"{spent():8.2f} everything, with collection", *lines]) + "\n")
