"""NVIDIA's bindings behind one call shape and one exception: CUDA 12's and CUDA 13's differ, our callers don't see it.

Every status is checked here and nowhere else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.errors import DriverError, FeatureUnavailable
from simpletuner_gh200.memory.driver.interface import Location

_LOCATION_TYPES = {"device": 1, "host": 2, "node": 3}
_KINDS = {number: kind for kind, number in _LOCATION_TYPES.items()}

NOT_FOUND = 500

REMEDIES = {
    1: "an address, size or location was not valid for this memory: report it with the output of gh200 selftest",
    2: "free device memory, or lower hbm_limit_gb or uvm_oversubscription_ratio",
    3: "CUDA was not initialized in this process: it may be a forked child",
    4: "the driver is shutting down: close slabs before the process ends",
    35: "update the NVIDIA driver (12.2 or newer is needed)",
    100: "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "this device can't do that: see gh200 doctor for its capabilities",
    201: "no CUDA context is current: report it with the output of gh200 selftest",
    304: "the operating system refused: raise the locked-memory limit (ulimit -l)",
    712: "this memory is registered with CUDA already",
    713: "this memory is not registered with CUDA",
    801: "this device or driver doesn't support it: see gh200 doctor",
    803: "the driver and the CUDA libraries don't fit together: update the driver",
}

UNNAMED_ATTRIBUTES = {"HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 141}
"""Known to drivers before NVIDIA's bindings had a name for them: those of CUDA 12.8 have none."""


class Bindings:
    """``call(name, ...)`` returns the value or raises DriverError; ``ask`` hands the status out for questions."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as missing:
            raise FeatureUnavailable(
                f"NVIDIA's bindings for Python are not installed ({missing})",
                remedy="pip install 'simpletuner-gh200[cuda]'",
            ) from missing
        self._driver = driver
        # With the 12.x bindings the calls that take a location are named "..._v2".
        self.advise = "cuMemAdvise_v2" if hasattr(driver, "cuMemAdvise_v2") else "cuMemAdvise"
        self.prefetch = "cuMemPrefetchAsync_v2" if hasattr(driver, "cuMemPrefetchAsync_v2") else "cuMemPrefetchAsync"

    def call(self, name: str, *arguments: Any) -> Any:
        code, value = self.ask(name, *arguments)
        self.check(name, code)
        return value

    def ask(self, name: str, *arguments: Any) -> tuple[int, Any]:
        """(status, value). The value is one thing, a tuple of several, or None."""
        try:
            status, *values = getattr(self._driver, name)(*arguments)
        except RuntimeError as missing:
            # The bindings find out at the first call that there is no driver library, or none with this function.
            remedy = f"install or repair the NVIDIA driver ({missing})"
            raise DriverError(name, NOT_FOUND, "NOT_FOUND", remedy=remedy) from missing
        return int(status), values[0] if len(values) == 1 else tuple(values) or None

    def check(self, name: str, code: int) -> None:
        if code:
            raise DriverError(name, code, self._error_name(code), remedy=REMEDIES.get(code))

    def _error_name(self, code: int) -> str:
        try:
            return str(self._driver.CUresult(code).name)
        except ValueError:
            return "unknown error"

    def advice(self, number: int) -> Any:
        return self._driver.CUmem_advise(number)

    def location(self, where: Location) -> Any:
        made = self._driver.CUmemLocation()
        made.type = self._driver.CUmemLocationType(_LOCATION_TYPES[where.kind])
        made.id = where.index
        return made

    @staticmethod
    def location_from(place: Any) -> Location | None:
        """As the driver reports it; None for a type that we have no name for."""
        name = _KINDS.get(int(place.type))
        if name is None or name == "host":
            return None if name is None else Location("host")
        return Location(name, int(place.id))  # type: ignore[arg-type]

    def pointer_attribute(self, number: int) -> Any:
        return self._driver.CUpointer_attribute(number)

    def device_attribute(self, name: str, ordinal: int) -> int | None:
        """None where these bindings or this driver don't know the attribute."""
        wanted = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if wanted is None and name in UNNAMED_ATTRIBUTES:
            wanted = SimpleNamespace(value=UNNAMED_ATTRIBUTES[name])  # all that the bindings look at
        if wanted is None:
            return None
        code, value = self.ask("cuDeviceGetAttribute", wanted, ordinal)
        if code == 1:
            return None
        self.check("cuDeviceGetAttribute", code)
        return int(value)
