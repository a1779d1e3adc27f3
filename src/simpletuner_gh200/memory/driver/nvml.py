"""NVML, as far as telemetry and the doctor need it: memory of a device, traffic over the chip-to-chip link.

Not every device answers every question. A GB10 has no memory of its own and says "not supported"; older drivers have
no link counters. Such an answer is None here, never an exception and never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner_gh200.config.environment import text
from simpletuner_gh200.errors import FeatureUnavailable

_LINK_METRICS = ("NVML_GPM_METRIC_C2C_TOTAL_RX_PER_SEC", "NVML_GPM_METRIC_C2C_TOTAL_TX_PER_SEC")
_MIB = 1 << 20


class NvmlDevice:
    """The device that CUDA calls ``ordinal`` in a process with this environment.

    Raises FeatureUnavailable where there is no library to connect to, or no such device.
    """

    def __init__(self, ordinal: int, environment: Mapping[str, str]) -> None:
        try:
            import pynvml as api
        except ImportError:
            raise FeatureUnavailable(
                "nvidia-ml-py is not installed", remedy="pip install 'simpletuner-gh200[cuda]'"
            ) from None
        self._api: Any = api
        name = visible(ordinal, environment)
        try:
            api.nvmlInit()
            by_index = isinstance(name, int)
            self._handle = api.nvmlDeviceGetHandleByIndex(name) if by_index else api.nvmlDeviceGetHandleByUUID(name)
        except api.NVMLError as refused:
            raise FeatureUnavailable(f"NVML does not answer for device {ordinal}: {refused}") from None
        self._samples: list[Any] = []
        self._link = self._has_link_counters()

    def close(self) -> None:
        self._api.nvmlShutdown()

    def memory(self) -> Any | None:
        """Bytes as ``total``, ``used`` and ``free``; None where the device has no memory of its own to tell of."""
        try:
            return self._api.nvmlDeviceGetMemoryInfo(self._handle)
        except self._api.NVMLError_NotSupported:
            return None

    def link_traffic(self) -> tuple[float, float] | None:
        """Bytes per second (to the device, from the device) over the chip-to-chip link since the last call."""
        if not self._link:
            return None
        api = self._api
        try:
            self._samples.append(api.nvmlGpmSampleGet(self._handle, api.nvmlGpmSampleAlloc()))
            if len(self._samples) < 2:
                return None
            traffic = self._between(*self._samples)
            api.nvmlGpmSampleFree(self._samples.pop(0))
        except api.NVMLError:
            self._link = False
            return None
        return traffic

    def _between(self, first: Any, second: Any) -> tuple[float, float]:
        api = self._api
        question = api.c_nvmlGpmMetricsGet_t()
        question.version = api.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(_LINK_METRICS)
        question.sample1, question.sample2 = first, second
        for place, name in enumerate(_LINK_METRICS):
            question.metrics[place].metricId = getattr(api, name)
        answer = api.nvmlGpmMetricsGet(question)
        received, sent = (float(answer.metrics[place].value) * _MIB for place in range(2))
        return received, sent

    def _has_link_counters(self) -> bool:
        api = self._api
        if not all(hasattr(api, name) for name in _LINK_METRICS):
            return False
        try:
            return bool(api.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except api.NVMLError:
            return False


def visible(ordinal: int, environment: Mapping[str, str]) -> int | str:
    """What NVML calls CUDA's device ``ordinal``: CUDA_VISIBLE_DEVICES hides and reorders, and NVML ignores it."""
    listed = [name.strip() for name in text("CUDA_VISIBLE_DEVICES", environment).split(",") if name.strip()]
    if ordinal >= len(listed):
        return ordinal
    return int(listed[ordinal]) if listed[ordinal].isdigit() else listed[ordinal]
