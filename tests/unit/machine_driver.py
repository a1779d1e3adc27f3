"""The null driver with a published machine's capacities and capabilities, for what looks at a GPU and moves no byte."""

from __future__ import annotations

from dataclasses import replace

from simpletuner_gh200.memory.driver.interface import Capabilities, MemoryMode, NullDriver
from simpletuner_gh200.plan.machines import Machine


class MachineDriver(NullDriver):
    def __init__(self, machine: Machine) -> None:
        super().__init__(f"stands for {machine.name}")
        self.machine = machine

    def device_count(self) -> int:
        return int(self.machine.has_device)

    def capabilities(self, ordinal: int) -> Capabilities:
        machine = self.machine
        mode: MemoryMode = "single pool" if machine.one_pool else "numa" if machine.coherent else "discrete"
        return replace(
            super().capabilities(ordinal),
            name=machine.title,
            managed=True,
            host_register=True,
            pageable_access=machine.coherent,
            integrated=machine.one_pool,
            device_total=machine.hbm,
            mode=mode if machine.has_device else "none",
        )

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        return self.machine.hbm, self.machine.hbm
