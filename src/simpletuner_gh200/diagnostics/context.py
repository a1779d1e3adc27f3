"""What checks may look at: a machine below ``root``, an environment, a search path, a configuration, a driver."""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from simpletuner_gh200.config.allocator import TorchBuild, find_torch
from simpletuner_gh200.config.files import Located
from simpletuner_gh200.config.packages import find_package
from simpletuner_gh200.config.training import Training, read_training
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.memory.numa import Call, Node, read_nodes, refused_calls
from simpletuner_gh200.upstream.importing import ImportVerdict, check_import

_AT_PAGESZ = 6
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")


@dataclass
class Context:
    """One examination. Everything expensive is looked up once, when a check first asks."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search_path: Sequence[str] | None = None
    """Where packages are looked for; None: as this interpreter's imports do."""
    config: Path | None = None
    machine: str = field(default_factory=platform.machine)
    allocate: bool = True
    """May checks allocate device memory and move bytes? ``--skip-allocation`` says no."""
    oversubscription_scale: float = 1.5
    check_import: Callable[[], ImportVerdict] = check_import
    """How it is found out whether the installed SimpleTuner imports, and its options; it takes long the first time."""

    @cached_property
    def torch(self) -> TorchBuild | None:
        return find_torch(self.search_path)

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

    @cached_property
    def training(self) -> Training | None:
        """The given configuration, as far as it can be read; None where none was given."""
        if self.config is None:
            return None
        return read_training(Located.at(self.config), self.environment, options=self.simpletuner.table)

    @cached_property
    def simpletuner(self) -> ImportVerdict:
        return self.check_import()

    def package(self, name: str) -> Path | None:
        """Where a package is, without importing it."""
        return find_package(name, self.search_path)

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
        found = []
        try:
            folders = sorted((self.root / "sys/bus/pci/devices").iterdir())
        except OSError:  # no PCI here, or not for this user
            return ()
        for folder in folders:
            kind = self.read(f"sys/bus/pci/devices/{folder.name}/class") or ""
            vendor = self.read(f"sys/bus/pci/devices/{folder.name}/vendor")
            if vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASSES):
                found.append(folder.name)
        return tuple(found)

    @cached_property
    def kernel_driver(self) -> str | None:
        """Version of NVIDIA's kernel driver, if it is loaded."""
        text = self.read("proc/driver/nvidia/version") or ""
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
        return found[1] if found else None

    @cached_property
    def page_size(self) -> int:
        """The kernel's page size, from the auxiliary vector of this process."""
        try:
            content = (self.root / "proc/self/auxv").read_bytes()
        except OSError:
            return os.sysconf("SC_PAGESIZE")
        whole = content[: len(content) // 16 * 16]
        pairs = dict(struct.iter_unpack("<QQ", whole))
        return int(pairs.get(_AT_PAGESZ, os.sysconf("SC_PAGESIZE")))

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
        """Cores this process may use: what is online, the cpuset and the cgroup's quota."""
        listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", self.read("proc/self/status") or "", re.MULTILINE)
        online = _count_list(listed[1]) if listed else os.cpu_count() or 1
        return max(1, min([online, *(round(quota) for quota in self._cpu_quotas())]))

    def _cpu_quotas(self) -> Iterator[float]:
        """Cores that each limited CPU cgroup of this process allows, ancestors included; v1 and v2."""
        for line in (self.read("proc/self/cgroup") or "").splitlines():
            _number, controllers, path = line.split(":", 2)
            for level in (path.strip("/"), *map(str, PurePosixPath(path.strip("/")).parents), ""):
                if not controllers:
                    quota, _, period = (self.read(f"sys/fs/cgroup/{level}/cpu.max") or "max").partition(" ")
                elif "cpu" in controllers.split(","):
                    quota = self.read(f"sys/fs/cgroup/cpu/{level}/cpu.cfs_quota_us") or "-1"
                    period = self.read(f"sys/fs/cgroup/cpu/{level}/cpu.cfs_period_us") or ""
                else:
                    break
                if quota.isdigit() and period.strip().isdigit():
                    yield int(quota) / int(period)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file():
                    total += entry.stat().st_size
    return total


def _count_list(text: str) -> int:
    """``0-3,8`` -> 5."""
    total = 0
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        total += int(last or first) - int(first) + 1
    return total
