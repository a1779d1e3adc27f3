"""Which driver this process gets, and why: CUDA where there is a device and a torch that can use it, else null."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from simpletuner_gh200.config.environment import local_rank
from simpletuner_gh200.errors import DriverError, FeatureUnavailable
from simpletuner_gh200.memory.driver.bindings import NOT_FOUND
from simpletuner_gh200.memory.driver.interface import Driver, NullDriver

_lock = threading.Lock()
_current: Driver | None = None
_pid = 0


def current() -> Driver:
    """The driver of this process, opened on first use. A forked child gets a null driver of its own."""
    global _current, _pid
    with _lock:
        if _current is None:
            _current, _pid = open_driver(), os.getpid()
        elif _pid != os.getpid():
            if _current.name == "cuda":
                _current = NullDriver("this is a forked child; the CUDA state is its parent's")
            _pid = os.getpid()
        return _current


def single_pool() -> bool:
    """Do the CPU and this process's GPU share one physical memory?"""
    driver = current()
    return driver.capabilities(driver.home).integrated


@contextmanager
def using(driver: Driver) -> Iterator[Driver]:
    """Make ``driver`` the current one inside the block: for tests and for the selftest."""
    global _current, _pid
    before = (_current, _pid)
    _current, _pid = driver, os.getpid()
    try:
        yield driver
    finally:
        _current, _pid = before


def open_driver() -> Driver:
    """CUDA if it can be had, otherwise a null driver that carries the reason."""
    reason = torch_refusal(_torch_version())
    if reason is not None:
        return NullDriver(reason)
    from simpletuner_gh200.memory.driver.cuda import CudaDriver

    try:
        driver = CudaDriver()
        count = driver.device_count()
        if not count:
            return NullDriver("the CUDA driver reports no device")
        driver.home = home_device(os.environ, count)
        return driver
    except DriverError as failed:
        return NullDriver("no NVIDIA driver is installed" if failed.code == NOT_FOUND else failed.message)
    except FeatureUnavailable as missing:
        return NullDriver(missing.message)


def home_device(environment: Mapping[str, str], count: int) -> int:
    """The device of this rank: its place on the node, as launchers tell it, among the devices it sees."""
    return local_rank(environment) % count


def torch_refusal(version: ModuleType | None) -> str | None:
    """Why this build of torch rules CUDA out; None where it doesn't. ``version`` is torch's own version module."""
    if version is None:
        return None
    if getattr(version, "hip", None):
        return f"this torch is built for AMD (HIP {version.hip}); everything CUDA stays off"
    if sys.platform == "darwin":
        return "this torch is built for macOS (MPS); everything CUDA stays off"
    if getattr(version, "xpu", None) and not getattr(version, "cuda", None):
        return f"this torch is built for Intel GPUs (XPU {version.xpu}); everything CUDA stays off"
    if not getattr(version, "cuda", None):
        return "this torch is a CPU build; on a machine with an NVIDIA GPU install a CUDA build of torch"
    return None


def _torch_version() -> ModuleType | None:
    """torch.version, without paying for ``import torch`` where nobody else has."""
    if "torch" in sys.modules:
        return sys.modules.get("torch.version")
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("_torch_version", Path(found.origin).parent / "version.py")
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
