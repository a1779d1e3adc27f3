"""What checks may look at: a machine below ``root``, an environment, a search path, a configuration, a driver."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

from simpletuner_gh200.config.allocator import TorchBuild, find_torch
from simpletuner_gh200.config.files import Located, find_package
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.memory.driver.interface import Capabilities, Driver
from simpletuner_gh200.memory.host import usable_cores
from simpletuner_gh200.memory.mapping import PAGE
from simpletuner_gh200.memory.numa import Call, Node, read_nodes, refused_calls
from simpletuner_gh200.upstream.importing import ImportVerdict, check_import

_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")


class NothingToLookAt(Exception):
    """Skips a check; the message says why."""


@dataclass
class Context:
    """One examination. Everything expensive is looked up once, when a check first asks."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search_path: Sequence[str] | None = None
    """Where packages are looked for; None: as this interpreter's imports do."""
    config: Path | None = None
    machine: str = field(default_factory=platform.machine)
    python: str = field(default_factory=platform.python_version)
    page_size: int = PAGE
    allocate: bool = True
    """May checks allocate device memory and move bytes? ``--skip-allocation`` says no."""
    oversubscription_scale: float = 1.5
    check_import: Callable[[], ImportVerdict] = check_import
    """How it is found out whether the installed SimpleTuner imports, and its options; it takes long the first time."""
    check_configuration: Callable[[Path], Sequence[str]] = lambda _config: ()
    """Raises for what would stop a run at its start; returns what else there is to know."""

    # -- software --------------------------------------------------------------------------------------

    @cached_property
    def torch(self) -> TorchBuild | None:
        return find_torch(self.search_path)

    @cached_property
    def simpletuner(self) -> ImportVerdict:
        return self.check_import()

    def package(self, name: str) -> Path | None:
        """Where a package is, without importing it."""
        return find_package(name, self.search_path)

    def version(self, name: str) -> str | None:
        """Of an installed distribution."""
        where = list(self.search_path) if self.search_path is not None else sys.path
        return next((found.version for found in distributions(name=name, path=where)), None)

    # -- the device ------------------------------------------------------------------------------------

    @cached_property
    def driver(self) -> Driver:
        """The driver of this process; the null one, with a reason, where there is no CUDA."""
        from simpletuner_gh200.memory.driver.detect import current

        return current()

    @property
    def has_device(self) -> bool:
        return self.driver.device_count() > 0

    @property
    def no_device(self) -> str:
        """Why there is no device to look at."""
        return str(getattr(self.driver, "reason", "no CUDA device"))

    @property
    def device(self) -> Capabilities:
        """Of the first one."""
        if not self.has_device:
            raise NothingToLookAt(self.no_device)
        return self.driver.capabilities(0)

    @property
    def device_to_allocate_on(self) -> Capabilities:
        if self.has_device and not self.allocate:
            raise NothingToLookAt("--skip-allocation")
        return self.device

    # -- the configuration -----------------------------------------------------------------------------

    @cached_property
    def training(self) -> Training | None:
        """The given configuration, as far as it can be read; None where none was given."""
        if self.config is None:
            return None
        return read_training(Located.at(self.config), self.environment, options=self.simpletuner.table)

    @property
    def given(self) -> Training:
        if self.training is None:
            raise NothingToLookAt("no configuration was given")
        return self.training

    # -- the machine -----------------------------------------------------------------------------------

    def read(self, path: str) -> str | None:
        """The text of a file below ``root``, stripped; None where it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return read_nodes(self.root / "sys/devices/system/node")

    @cached_property
    def nvidia_gpus(self) -> tuple[str, ...]:
        """PCI addresses of NVIDIA GPUs, whether or not a driver is loaded for them."""
        bus = "sys/bus/pci/devices"
        try:
            names = sorted(folder.name for folder in (self.root / bus).iterdir())
        except OSError:  # no PCI here, or not for this user
            return ()
        ours = (name for name in names if self.read(f"{bus}/{name}/vendor") == _NVIDIA_VENDOR)
        return tuple(name for name in ours if (self.read(f"{bus}/{name}/class") or "").startswith(_DISPLAY_CLASSES))

    @cached_property
    def kernel_driver(self) -> str | None:
        """Version of NVIDIA's kernel driver, if it is loaded."""
        text = self.read("proc/driver/nvidia/version") or ""
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
        return found[1] if found else None

    @cached_property
    def refused_placement(self) -> Mapping[Call, str]:
        """Calls on memory placement that the kernel or a container's filter refuses, and why."""
        return refused_calls()

    def limit(self, name: str) -> int | None:
        """The soft limit of this process with that name in /proc/self/limits; None is unlimited or unknown."""
        text = self.read("proc/self/limits") or ""
        found = re.search(rf"^{re.escape(name)}\s+(\S+)", text, re.MULTILINE)
        return int(found[1]) if found and found[1].isdigit() else None

    @cached_property
    def cores(self) -> int:
        return usable_cores(self.root)


def dotted(version: int) -> str:
    """CUDA's, as the driver gives it: ``12020`` -> ``12.2``."""
    return f"{version // 1000}.{version % 1000 // 10}"
