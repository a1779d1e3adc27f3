"""A healthy GH200 as a folder: what /proc and /sys say there, and a Python search path with the right packages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.memory.driver.interface import NullDriver
from simpletuner_gh200.memory.numa import Call
from simpletuner_gh200.upstream.importing import ImportVerdict
from tests.unit.few_options import TABLE

GIB_IN_KIB = 1024 * 1024


class Machine:
    """Written below ``folder``; ``put`` changes one file of it, ``context`` lets checks look at it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.site = folder / "site"
        self.data = folder / "data"
        self.environment: dict[str, str] = {}
        self.config: Path | None = None
        self.page_size = 65536
        self.refused_placement: dict[Call, str] = {}
        self.python = "3.13.1"
        self.imported = ImportVerdict(True, version="4.10.1", table=TABLE)
        self.check_configuration: Callable[[Path], Sequence[str]] = lambda _config: ()
        self._put_host()
        self._put_gpu()
        self._put_packages()

    def put(self, path: str, content: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def context(self, **changes: Any) -> Context:
        context = Context(
            root=self.root,
            environment=self.environment,
            search_path=(str(self.site),),
            config=self.config,
            machine="aarch64",
            python=self.python,
            page_size=self.page_size,
            **{"check_import": lambda: self.imported, "check_configuration": self.check_configuration, **changes},
        )
        context.driver = NullDriver("no driver library here")
        context.refused_placement = self.refused_placement
        return context

    def node(self, index: int, cpus: str, *, total: int, free: int, cached: int = 0) -> None:
        """Sizes in GiB."""
        folder = f"sys/devices/system/node/node{index}"
        self.put(f"{folder}/cpulist", cpus + "\n")
        sizes = {"MemTotal": total, "MemFree": free, "FilePages": cached, "Shmem": 0}
        lines = [f"Node {index} {name}:  {size * GIB_IN_KIB} kB" for name, size in sizes.items()]
        self.put(f"{folder}/meminfo", "\n".join(lines) + "\n")

    def meminfo(self, *, total: int, free: int, available: int) -> None:
        sizes = {"MemTotal": total, "MemFree": free, "MemAvailable": available}
        self.put("proc/meminfo", "".join(f"{name}: {size * GIB_IN_KIB} kB\n" for name, size in sizes.items()))

    def limits(self, *, locked: str = "unlimited", files: str = "65536") -> None:
        lines = [
            "Limit                     Soft Limit           Hard Limit           Units     ",
            f"Max open files            {files:<20} {files:<20} files     ",
            f"Max locked memory         {locked:<20} {locked:<20} bytes     ",
        ]
        self.put("proc/self/limits", "\n".join(lines) + "\n")

    def torch(self, version: str, *, cuda: str | None) -> None:
        folder = self.site / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise ImportError('the doctor must not import torch')\n")
        (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n")

    def package(self, name: str) -> None:
        (self.site / name).mkdir(parents=True, exist_ok=True)
        (self.site / name / "__init__.py").write_text("")

    def without(self, name: str) -> None:
        shutil.rmtree(self.site / name)

    def simpletuner(self, version: str) -> None:
        for old in self.site.glob("simpletuner-*.dist-info"):
            shutil.rmtree(old)
        info = self.site / f"simpletuner-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: simpletuner\nVersion: {version}\n")

    def configure(self, *, dataset: dict[str, Any] | None = None, **values: Any) -> None:
        """A training configuration with one in-memory dataset of one small file."""
        images = self.data / "images"
        images.mkdir(parents=True, exist_ok=True)
        (images / "a.txt").write_text("a caption")
        (images / "a.jpg").write_bytes(b"an image")
        entry = {"id": "pictures", "type": "in_memory", "instance_data_dir": str(images), **(dataset or {})}
        (self.data / "datasets.json").write_text(json.dumps([entry]))
        self.config = self.data / "config.json"
        base = {"data_backend_config": str(self.data / "datasets.json"), "output_dir": str(self.data / "out")}
        self.config.write_text(json.dumps({**base, **values}))

    def _put_host(self) -> None:
        self.node(0, "0-71", total=480, free=400)
        self.meminfo(total=480, free=100, available=400)
        self.limits()
        self.put("proc/self/cgroup", "0::/\n")
        self.put("sys/fs/cgroup/cpu.max", "max 100000\n")
        self.put("proc/mounts", "shm /dev/shm tmpfs rw,nosuid,size=67108864k 0 0\n")
        self.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never\n")
        self.put("proc/sys/kernel/numa_balancing", "0\n")

    def _put_gpu(self) -> None:
        self.put("sys/bus/pci/devices/0009:01:00.0/vendor", "0x10de\n")
        self.put("sys/bus/pci/devices/0009:01:00.0/class", "0x030200\n")
        release = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n"
        self.put("proc/driver/nvidia/version", release)
        self.put("proc/driver/nvidia/params", 'CoherentGPUMemoryMode: "driver"\n')

    def _put_packages(self) -> None:
        for name in ("cuda", "pynvml", "lz4", "cramjam", "zstandard"):
            self.package(name)
        self.torch("2.11.0+cu130", cuda="13.0")
        self.simpletuner("4.10.1")
