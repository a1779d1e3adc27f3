"""Running the checks: every one gets its turn, and the report is the same object for people, files and ``--json``."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import simpletuner_gh200
from simpletuner_gh200.diagnostics.check import SYMBOLS, Check, CheckResult, Results, all_checks, warned
from simpletuner_gh200.diagnostics.context import Context, dotted
from simpletuner_gh200.memory.host import host_memory, read_meminfo
from simpletuner_gh200.telemetry.redact import printable, redact_text
from simpletuner_gh200.units import counted

GPU = "GH201"
"""The check that is skipped where there is no GPU."""

PACKAGES = ("simpletuner", "torch", "accelerate", "diffusers", "transformers", "cuda-bindings", "nvidia-ml-py", "lz4")


@dataclass(frozen=True)
class Examination(Results):
    """The results of one examination, in the order of their codes."""

    machine: Mapping[str, Any] = field(default_factory=dict)
    """What was examined, see ``describe``."""

    @property
    def verdict(self) -> str:
        """In a few words: may a run start?"""
        failed, warned = self.counts["fail"], self.counts["warn"]
        if failed:
            return f"not ready: {counted(failed, 'check')} failed"
        found = f"with {counted(warned, 'warning')}" if warned else ""
        if any(check.code == GPU and result.status == "skip" for check, result in self.rows):
            return f"nothing failed{f', {found}' if found else ''}, but no GPU is here: what needs one was not examined"
        return f"ready, {found}" if found else "ready"

    def to_json(self) -> dict[str, Any]:
        """What scripts rely on: checks[]/{code,what,why,found,fix,status}, summary, machine."""
        checks = [
            {"code": check.code, "what": check.what, "why": check.why, **vars(result), "symbol": SYMBOLS[result.status]}
            for check, result in self.rows
        ]
        return {"machine": dict(self.machine), "checks": checks, "summary": {**self.counts, "ok": self.ok}}


def examine(context: Context, checks: Sequence[Check] | None = None) -> Examination:
    def unexamined(what: str) -> CheckResult:
        return warned(f"could not be examined: {what}", "look at the message; it may be a bug")

    chosen = all_checks() if checks is None else checks
    rows = ((check, _redacted(check.result(context, unexamined))) for check in chosen)
    return Examination(tuple(rows), describe(context))


def _redacted(result: CheckResult) -> CheckResult:
    found, fix = (printable(redact_text(words), lines=True) for words in (result.found, result.fix))
    return CheckResult(result.status, found, fix)


# -- what was examined: when, where, which hardware and which versions, for whoever audits --------------------
# A GPU is known by its name or its PCI device id: no serial number, no UUID and no place on the bus is told.


def describe(context: Context) -> dict[str, Any]:
    """JSON-ready. None where the machine does not say; bytes are bytes."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": context.read("proc/sys/kernel/hostname") or platform.node(),
        "architecture": context.machine,
        "kernel": context.read("proc/sys/kernel/osrelease") or platform.release(),
        "page_bytes": context.page_size,
        "cores": context.cores,
        "driver": context.kernel_driver,
        "cuda": dotted(context.device.driver_version) if context.has_device else None,
        "gpus": _gpus(context),
        "memory": _memory(context),
        "versions": {
            "python": platform.python_version(),
            "simpletuner-gh200": simpletuner_gh200.__version__,
            **{name: context.version(name) for name in PACKAGES},
        },
    }


def _memory(context: Context) -> dict[str, Any] | None:
    try:
        installed, usable = read_meminfo(context.root)["MemTotal"], host_memory(context.root)
    except (OSError, KeyError):
        return None  # the checks say why
    return {
        "total_bytes": installed,
        "usable_bytes": usable.total,
        "available_bytes": usable.available,
        "nodes": [{"node": node.index, "cpus": node.has_cpus, "free_bytes": node.free} for node in context.nodes],
    }


def _gpus(context: Context) -> list[dict[str, Any]]:
    """The driver's devices; what only the PCI bus knows of, where no driver answers."""
    if context.has_device:
        devices = [context.driver.capabilities(ordinal) for ordinal in range(context.driver.device_count())]
        return [{"name": device.name, "memory_bytes": device.device_total} for device in devices]
    ids = (context.read(f"sys/bus/pci/devices/{place}/device") for place in context.nvidia_gpus)
    return [{"name": None, "memory_bytes": None, "pci_device": each} for each in ids]
