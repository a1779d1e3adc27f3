"""Which mechanism the pool takes: each is tried in a child process, and its bandwidth measured, never assumed.

The virtual memory calls have crashed on some machines and been two hundred times slower than pinned memory on others;
so a crash must not be the run's, and the numbers decide (``choose``, pure).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.pool.pool import MECHANISMS, Allocator, Mechanism
from simpletuner_gh200.units import MIB

SIZE = 128 * MIB
PATIENCE = 120.0
FAR_BELOW = 0.1
"""Of the other's bandwidth: a mechanism that slow is not used, whatever else speaks for it."""
CLEARLY = 1.1
"""By so much the virtual memory calls have to be faster than plain pinned memory, which is the simpler one."""


@dataclass(frozen=True)
class Tried:
    """One mechanism tried: bytes per second as the device reads and writes it, or why it can't be had."""

    mechanism: Mechanism
    read: float = 0.0
    write: float = 0.0
    error: str | None = None

    @property
    def rate(self) -> float:
        """Of the slower direction."""
        return min(self.read, self.write)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.mechanism}: {self.error}"
        return f"{self.mechanism}: {self.read / 1e9:.1f} GB/s read, {self.write / 1e9:.1f} GB/s written"


@dataclass(frozen=True)
class Choice:
    """The mechanism that is taken, and why not the others."""

    taken: Tried
    why: str


def impossible(mechanism: Mechanism, caps: Capabilities) -> str | None:
    """Why a device can't do it, by its own account; None where it is worth a try."""
    if mechanism == "host":
        return None if caps.maps_host_memory else "the device can't map host memory"
    if caps.host_node is None:
        return "the driver names no CPU node of the device"
    return None if caps.node_vmm else "the device has no virtual memory management of host nodes"


def choose(trials: Sequence[Tried]) -> Choice | None:
    """The mechanism for this machine; None where none works. Pure."""
    working = [trial for trial in trials if trial.error is None]
    if not working:
        return None
    best = max(working, key=lambda trial: trial.rate)
    plain = next((trial for trial in working if trial.mechanism == "host"), None)
    taken = plain if plain is not None and best.rate < CLEARLY * plain.rate else best
    return Choice(taken, "; ".join(_why_not(trial, taken) for trial in trials if trial is not taken))


def _why_not(trial: Tried, taken: Tried) -> str:
    if trial.error is not None:
        return f"not {trial}"
    slow = f"less than a tenth of {taken.mechanism}" if trial.rate < FAR_BELOW * taken.rate else "no faster"
    return f"not {trial}: {slow}"


def try_out(caps: Capabilities) -> list[Tried]:
    """Every mechanism by itself, in child processes; what the device rules out is not tried."""
    return [
        Tried(mechanism, error=why) if (why := impossible(mechanism, caps)) else _in_a_child(mechanism, caps)
        for mechanism in MECHANISMS
    ]


def _in_a_child(mechanism: Mechanism, caps: Capabilities) -> Tried:
    node = "" if caps.host_node is None else str(caps.host_node)
    command = [sys.executable, "-m", "simpletuner_gh200.memory.pool.probe", mechanism, str(caps.ordinal), node]
    # The extension itself is not to start in there, and Python's path is this process's.
    surroundings = for_child({SWITCH: "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    try:
        done = subprocess.run(
            command, env=surroundings, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return Tried(mechanism, error=f"no answer within {PATIENCE:g} s")
    if done.returncode < 0:
        return Tried(mechanism, error=f"the trial was ended by {signal.Signals(-done.returncode).name}")
    try:
        return Tried(**json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return Tried(mechanism, error=f"the trial failed: {done.stderr.strip()[-300:] or done.returncode}")


def measure(driver: Driver, mechanism: Mechanism, ordinal: int, node: int | None, size: int = SIZE) -> Tried:
    """Allocate as the pool does, copy to HBM and back by the device's clock."""
    allocator = Allocator(mechanism, limit=2 * size, node=node)
    grace = allocator.alloc(size, ordinal)
    if grace is None:
        return Tried(mechanism, error=f"allocation was refused with error {allocator.state().last_error}")
    try:
        return Tried(mechanism, *driver.copy_rates(grace, size, ordinal))
    finally:
        allocator.free(grace, size, ordinal)


def main(words: Sequence[str]) -> int:
    """In the child: one mechanism, one line of JSON."""
    from simpletuner_gh200.memory.driver.cuda import CudaDriver

    mechanism, ordinal, node = words
    if mechanism not in MECHANISMS:
        raise SystemExit(f"{mechanism!r} is not a mechanism; accepted: {', '.join(MECHANISMS)}")
    try:
        driver = CudaDriver(int(ordinal))
        trial = measure(driver, mechanism, int(ordinal), int(node) if node else None)
    except GH200Error as failed:
        trial = Tried(mechanism, error=failed.message)
    sys.stdout.write(json.dumps(asdict(trial)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
