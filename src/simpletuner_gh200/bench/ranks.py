"""Ranks to be measured: interpreters of their own that take a step when asked, and answer with a number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Rank:
    def __init__(self, module: str, argument: Path, rank: int, world: int, work: Path) -> None:
        environment = {
            **os.environ,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_PORT": str(os.getpid()),
            "XDG_RUNTIME_DIR": "",
            "TMPDIR": str(work),
        }
        command = [sys.executable, "-m", module, str(argument)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, step: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextmanager
def ranks(module: str, argument: Path, world: int, work: Path) -> Iterator[list[Rank]]:
    """``world`` of them, each running ``module`` as a program; none ends before the block does."""
    started = [Rank(module, argument, rank, world, work) for rank in range(world)]
    try:
        yield started
    finally:
        for rank in started:
            rank.end()


def answer(step: Callable[[str], int]) -> None:
    """In the rank: do what is asked until nobody asks any more."""
    for line in sys.stdin:
        print(step(line.rstrip("\n")), flush=True)
