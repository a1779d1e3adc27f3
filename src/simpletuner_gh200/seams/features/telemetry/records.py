"""The records of a run: what is in them, what host and device tell for them, and which numbers go to the trackers."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from simpletuner_gh200 import __version__
from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.nvml import NvmlDevice
from simpletuner_gh200.memory.host import host_memory
from simpletuner_gh200.telemetry.measure import Source, StepTimes
from simpletuner_gh200.telemetry.redact import redact, redact_command

if TYPE_CHECKING:
    from simpletuner_gh200.seams.runtime import Runtime

logger = logging.getLogger("simpletuner_gh200")

SCHEMA = 1
Groups = Mapping[str, Mapping[str, Any]]
"""Numbers of each source, or feature."""
PREFIX = "gh200/"
_TRACKED = ("step_seconds", "data_wait_seconds", "compute_seconds", "samples_per_second", "major_faults", "slab_bytes")


def caching_record(told: Mapping[str, Any]) -> dict[str, Any]:
    """Before the run's own start: how far a caching pass of this process is."""
    return {"kind": "caching", "time": time.time(), "pid": os.getpid(), "host": platform.node(), **told}


def start_record(runtime: Runtime, trainer: Any) -> dict[str, Any]:
    """What the run is: versions, settings and where they came from, seams, features. Secrets are hidden."""
    settings = runtime.settings
    rows = settings.rows() if settings is not None else []
    return {
        "kind": "start",
        "schema": SCHEMA,
        "time": time.time(),
        "step": int(trainer.state.get("global_step", 0)),
        "max_steps": int(getattr(trainer.config, "max_train_steps", 0) or 0),
        "ranks": int(trainer.accelerator.num_processes),
        "rank": int(trainer.accelerator.process_index),
        "pid": os.getpid(),
        "host": platform.node(),
        "versions": {"simpletuner-gh200": __version__, "python": platform.python_version(), **_packages()},
        "settings": {
            key: {"value": redact(value, name=key.rpartition(".")[2]), "origin": origin} for key, value, origin in rows
        },
        "training": redact(_plain(runtime.raw_config or {})),
        "command": redact_command(sys.argv),
        "memory": dict(runtime.decision),
        **runtime.state(),
    }


def end_record(runtime: Runtime, *, dropped: int) -> dict[str, Any]:
    outcome = runtime.outcome
    return {
        "kind": "end",
        "time": time.time(),
        "status": outcome.status,
        "reason": redact(outcome.reason),
        "step": outcome.global_step,
        "seconds": dict(runtime.phases.seconds),
        "dropped": dropped,
    }


def step_record(
    step: int | None, times: StepTimes, world: int, values: Mapping[str, Any], sampled: Groups, features: Groups
) -> dict[str, Any]:
    """One optimizer step. ``values`` are those on their way to the trackers."""
    host = sampled.get("host") or {}
    effective = values.get("gh200/effective_batch_size") or times.samples * world
    return {
        "kind": "step",
        "step": step,
        "time": time.time(),
        "step_seconds": times.seconds,
        "data_wait_seconds": times.data_wait,
        "compute_seconds": times.compute,
        "save_seconds": times.saving,
        "other_seconds": times.other,
        "micro_batches": times.micro_batches,
        "effective_batch": effective,
        "samples_per_second": times.samples * world / times.seconds if times.seconds > 0 else 0.0,
        "loss": number(values.get("train_loss")),
        "learning_rate": number(values.get("learning_rate")),
        "minor_faults": host.get("minor_faults", 0),
        "major_faults": host.get("major_faults", 0),
        "slab_bytes": _held(features),
        "metrics": {
            name: value
            for name, given in values.items()
            if name.startswith(PREFIX) and (value := number(given)) is not None
        },
        **{name: dict(answer) for name, answer in sampled.items()},
        **({"features": {name: dict(answer) for name, answer in features.items()}} if features else {}),
    }


def tracked(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step record as they go to trackers and events, under ``gh200/``."""
    found: dict[str, float] = {PREFIX + name: record[name] for name in _TRACKED}
    found[PREFIX + "effective_batch_size"] = record["effective_batch"]
    if record["step_seconds"] > 0:
        found[PREFIX + "data_wait_share"] = record["data_wait_seconds"] / record["step_seconds"]
    groups = {name: record.get(name) or {} for name in ("host", "device")} | (record.get("features") or {})
    return {**found, **_leaves("gh200", groups)}


def _held(features: Groups) -> float:
    """Bytes that all features together hold in slabs."""
    return sum(value for name, value in _leaves("", features).items() if name.endswith("/held_bytes"))


def number(value: Any) -> float | int | None:
    """A plain number, also out of a tensor or numpy scalar; None for what is none. Never waits for a device."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    device = getattr(value, "device", None)
    if device is not None and str(device) != "cpu":
        return None  # reading it would stall the stream
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _leaves(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(_leaves(f"{prefix}/{name}", value))
        elif (plain := number(value)) is not None:
            found[f"{prefix}/{name}"] = plain
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration values that JSON can say; objects that SimpleTuner put beside them are left out."""
    kinds = (str, int, float, bool, list, dict, type(None))
    return {name: value for name, value in values.items() if isinstance(value, kinds)}


def _packages() -> dict[str, str]:
    names = ("simpletuner", "torch", "accelerate", "diffusers", "transformers", "peft")
    found = ((name, next(iter(importlib.metadata.Distribution.discover(name=name)), None)) for name in names)
    return {name: package.version for name, package in found if package is not None}


# -- what the machine tells ------------------------------------------------------------------------------------


def sources(trainer: Any) -> dict[str, Source]:
    """What this machine can tell; without a GPU there is no device to ask."""
    found: dict[str, Source] = {"host": _host}
    device = _device(trainer)
    return found if device is None else {**found, "device": device}


def _device(trainer: Any) -> Source | None:
    place = trainer.accelerator.device
    if place.type != "cuda":
        return None
    try:
        device = NvmlDevice(place.index or 0, os.environ)
    except FeatureUnavailable as missing:
        logger.info("gh200: no device numbers in telemetry: %s", missing.message)
        return None
    from torch.cuda import memory_reserved

    return partial(_device_numbers, device, partial(memory_reserved, place))


def _device_numbers(device: NvmlDevice, of_torch: Callable[[], int]) -> Mapping[str, Any]:
    """Only what the device has an answer to; ``reserved`` is what of it torch's allocator took."""
    numbers: dict[str, Any] = {}
    memory = device.memory()
    if memory is not None:
        numbers.update(total=memory.total, used=memory.used, free=memory.free, reserved=of_torch())
    traffic = device.link_traffic()
    if traffic is not None:
        numbers.update(link_in_per_second=traffic[0], link_out_per_second=traffic[1])
    return numbers


def _host() -> Mapping[str, Any]:
    memory = host_memory()
    resident = _resident()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "available": memory.available,
        "total": memory.total,
        "resident": resident.get("VmRSS", 0),
        "shared": resident.get("RssShmem", 0),
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
    }


def _resident() -> dict[str, int]:
    """Bytes that this process has in memory; RssShmem is what it has mapped of memfds: slabs that ranks share."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        lines = (line.split() for line in file if line.startswith(("VmRSS", "RssShmem")))
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
