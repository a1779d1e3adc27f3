"""``gh200 selftest --bench``: the link, the ways to Grace memory, and what nobody here could measure without a GPU.

Ten questions about the model in Grace that only hardware answers. Each answer is a dict of numbers, or None where
this machine can't tell (no device, an emulated one, no CUDA torch); an error of torch's is an answer, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.environment import EMULATED, text
from simpletuner_gh200.diagnostics.checks.link import DIRECTIONS
from simpletuner_gh200.diagnostics.checks.link import measure as measure_link
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.memory.lane import Lane, lanes, spot_of
from simpletuner_gh200.memory.pool.pool import MECHANISMS, Allocator, GracePool, Mechanism
from simpletuner_gh200.memory.pool.probe import Tried, choose, try_out
from simpletuner_gh200.units import GIB, MIB

if TYPE_CHECKING:
    import torch

SIZE = GIB
REPEATS = 5

Answer = dict[str, Any] | None

NOT_OFFERED = {"read": None, "write": None}
"""Of managed memory, too, which the pool had once."""


@dataclass(frozen=True)
class MachineUnderTest:
    """What the later questions build on."""

    driver: Driver
    caps: Capabilities
    trials: dict[Mechanism, Tried]

    @property
    def working(self) -> list[Mechanism]:
        return [name for name, trial in self.trials.items() if trial.error is None]

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", self.caps.ordinal)

    @property
    def taken(self) -> Mechanism | None:
        choice = choose(list(self.trials.values()))
        return None if choice is None else choice.taken.mechanism


def measure_machine(driver: Driver, ordinal: int = 0) -> dict[str, Any]:
    """JSON-ready: ``link``, ``pool``, ``questions``; None for whatever can't be measured here."""
    caps = driver.capabilities(ordinal)
    if caps.mode == "none":
        return nothing_measured()
    trials: dict[Mechanism, Tried] = {trial.mechanism: trial for trial in try_out(caps)}
    machine = MachineUnderTest(driver, caps, trials)
    return {
        "link": {
            way: measure_link(driver, ordinal, direction, node=caps.host_node).rate / 1e9
            for way, direction in zip(("h2d", "d2h"), DIRECTIONS, strict=True)
        },
        "pool": {**{name: _rates(trial) for name, trial in trials.items()}, "managed": NOT_OFFERED},
        "questions": {str(number): _answer(question, machine) for number, question in QUESTIONS.items()},
    }


def nothing_measured() -> dict[str, Any]:
    """What ``measure_machine`` says where nothing answers."""
    return {
        "link": {"h2d": None, "d2h": None},
        "pool": dict.fromkeys((*MECHANISMS, "managed"), NOT_OFFERED),
        "questions": {str(number): None for number in QUESTIONS},
    }


def _rates(trial: Tried) -> dict[str, Any]:
    if trial.error is not None:
        return {"read": None, "write": None, "error": trial.error}
    return {"read": trial.read / 1e9, "write": trial.write / 1e9}


def _answer(question: Callable[[MachineUnderTest], Answer], machine: MachineUnderTest) -> Answer:
    try:
        return question(machine)
    except RuntimeError as failed:  # torch's own errors, out of memory among them
        return {"error": str(failed).splitlines()[0]}


# -- with the driver alone ----------------------------------------------------------------------------------------


@contextmanager
def _block(mechanism: Mechanism, ordinal: int, node: int | None, size: int) -> Iterator[int | None]:
    """Memory as the pool takes it. What the one allocator of this process holds already counts, too."""
    allocator = Allocator(mechanism, limit=2 * size + allocator_held(), node=node)
    address = allocator.alloc(size, ordinal)
    try:
        yield address
    finally:
        if address is not None:
            allocator.free(address, size, ordinal)


def allocator_held() -> int:
    return Allocator("host", limit=0).state().held


def _what_pointers_are(machine: MachineUnderTest) -> Answer:
    """1: what the driver says of such memory, and whether a copy to HBM takes it at full speed."""
    answers: dict[str, Any] = {}
    for name in machine.working:
        with _block(name, machine.caps.ordinal, machine.caps.host_node, 2 * MIB) as address:
            if address is not None:
                place = machine.driver.physical_location(address)
                answers[name] = {
                    "memory_type": machine.driver.pointer_kind(address),
                    "location": None if place is None else str(place),
                    "copy_gb_per_s": machine.trials[name].read / 1e9,
                }
    return answers or None


def _when_grace_is_full(machine: MachineUnderTest) -> Answer:
    """6: an error where there is no more, or a kill? A child asks for twice what the host has, and is the one to go."""
    node = "" if machine.caps.host_node is None else str(machine.caps.host_node)
    answers: dict[str, Any] = {}
    for name in machine.working:
        command = [sys.executable, "-m", __name__, name, str(machine.caps.ordinal), node]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        ended = done.returncode < 0
        answers[name] = {"killed": ended} if ended else json.loads(done.stdout.strip().splitlines()[-1])
    return answers or None


def _ask_for_too_much(mechanism: Mechanism, ordinal: int, node: int | None) -> dict[str, Any]:
    """In the child."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    with _block(mechanism, ordinal, node, 2 * host_memory().total) as address:
        return {"refused": address is None, "error": Allocator(mechanism, limit=0).state().last_error}


# -- with kernels of torch's ----------------------------------------------------------------------------------------


def _pool(machine: MachineUnderTest, mechanism: Mechanism | None) -> GracePool | None:
    """None where kernels can't be run."""
    import torch

    if mechanism is None or not torch.cuda.is_available() or text(EMULATED):
        return None
    ordinal, room = machine.caps.ordinal, 8 * SIZE + allocator_held()
    return GracePool(mechanism, limit=room, why="the self-test", ordinal=ordinal, node=machine.caps.host_node)


def best_seconds(lane: Lane, work: Callable[[], Any]) -> float:
    """Of several times, by the device's clock."""

    def once() -> float:
        before = lane.mark()
        work()
        return lane.seconds(before, lane.mark())

    return min([once() for _ in range(REPEATS + 1)][1:])


def _of_blocks(number: int, machine: MachineUnderTest) -> Answer:
    """8 to 10: what bringing weights costs."""
    from simpletuner_gh200.diagnostics.selftest.blocks import QUESTIONS as OF_BLOCKS

    pool = _pool(machine, machine.taken)
    return None if pool is None else OF_BLOCKS[number](machine.device, pool)


def _in_place(machine: MachineUnderTest) -> Answer:
    """2: kernels that read and write the memory where it is, by mechanism."""
    import torch

    rates: dict[str, Any] = {}
    for name in machine.working:
        pool = _pool(machine, name)
        if pool is None:
            continue
        grace = pool.take(torch.empty(SIZE // 4, device=machine.device))
        lane = lanes(machine.device)[0]
        rates[name] = {
            "read": SIZE / best_seconds(lane, grace.sum) / 1e9,
            "write": SIZE / best_seconds(lane, partial(grace.fill_, 1.0)) / 1e9,
        }
    return rates or None


def _optimizer_kernels(machine: MachineUnderTest) -> Answer:
    """3: fused and foreach AdamW over state in Grace."""
    import torch

    pool = _pool(machine, machine.taken)
    if pool is None:
        return None
    from simpletuner_gh200.model.catching import CaughtOptimizer, Keeper
    from simpletuner_gh200.model.placement import Placement

    rates = {}
    for kind in ("fused", "foreach"):
        weights = [torch.nn.Parameter(torch.zeros(SIZE // 64, device=machine.device)) for _ in range(8)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(weights, **{kind: True})
        caught = CaughtOptimizer(optimizer, Keeper(pool, Placement("cpu_first", MIB)))
        caught.step(optimizer.step)
        size, seconds = caught.tally.bytes, best_seconds(lanes(machine.device)[0], optimizer.step)
        rates[kind] = {"seconds_per_gib": seconds * GIB / size, "gb_per_s_read_once": size / seconds / 1e9}
    return rates


def _overlap(machine: MachineUnderTest) -> Answer:
    """4: do copies from Grace run while the device computes? 1: entirely, 0: one after the other."""
    import torch

    pool = _pool(machine, machine.taken)
    if pool is None:
        return None
    near = torch.empty(SIZE, dtype=torch.uint8, device=machine.device)
    grace, lane = pool.take(near), lanes(near.device)[1]
    square = torch.zeros(8192, 8192, device=near.device, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(4):
            torch.mm(square, square)

    def copy(meanwhile: Callable[[], None] = lambda: None) -> None:
        ticket = lane.copy([(spot_of(near), spot_of(grace), SIZE)], lane.here())
        meanwhile()
        lane.wait(ticket)

    alone = best_seconds(lane, copy), best_seconds(lane, compute)
    together = best_seconds(lane, partial(copy, compute))
    return {"overlap": (sum(alone) - together) / min(alone), "copy_gb_per_s": SIZE / alone[0] / 1e9}


def _beside_torch(machine: MachineUnderTest) -> Answer:
    """5: device memory that no plan of tensors shows: context, workspaces of the libraries."""
    import torch

    if _pool(machine, "host") is None:
        return None
    ordinal = machine.caps.ordinal
    square = torch.zeros(1024, 1024, device=machine.device, dtype=torch.bfloat16)
    torch.mm(square, square)
    torch.cuda.synchronize(ordinal)
    free, total = machine.driver.memory_info(ordinal)
    held = allocator_held()
    return {"beside_torch_bytes": total - free - max(torch.cuda.memory_reserved(ordinal) - held, 0)}


def _first_touch(machine: MachineUnderTest) -> Answer:
    """7: what the first step pays once, for memory that has never been used."""
    mechanism = machine.taken
    if mechanism is None:
        return None
    size = 256 * MIB
    started = time.perf_counter()
    with _block(mechanism, machine.caps.ordinal, machine.caps.host_node, size) as address:
        seconds = time.perf_counter() - started
        return None if address is None else {"mechanism": mechanism, "seconds_per_gib": seconds * GIB / size}


QUESTIONS: dict[int, Callable[[MachineUnderTest], Answer]] = {
    1: _what_pointers_are,
    2: _in_place,
    3: _optimizer_kernels,
    4: _overlap,
    5: _beside_torch,
    6: _when_grace_is_full,
    7: _first_touch,
    **{number: partial(_of_blocks, number) for number in (8, 9, 10)},
}


if __name__ == "__main__":
    wanted, device, node = sys.argv[1:]
    found = _ask_for_too_much(wanted, int(device), int(node) if node else None)  # type: ignore[arg-type]
    sys.stdout.write(json.dumps(found) + "\n")
