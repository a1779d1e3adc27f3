"""A proof beside an earlier one, and what plans learn from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.plan.calibration import remember_context, remember_rates
from simpletuner_gh200.plan.machines import Machine

Told = Mapping[str, Any]
"""A proof as it is written."""

GB = 10**9
_RATES = ("link/h2d", "link/d2h", *(f"pool/{name}/{way}" for name in ("host", "vmm") for way in ("read", "write")))


def read_earlier(path: Path) -> Told:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as refused:
        raise UsageError(f"cannot read {path}: {refused.strerror}", remedy="name a report of `gh200 prove`") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON", remedy="name the .json that `gh200 prove` wrote") from None
    if not isinstance(found, dict) or "ab" not in found or "machine" not in found:
        raise UsageError(f"{path} is no report of `gh200 prove`", remedy="name the .json that it wrote")
    return found


def against(now: Told, earlier: Told) -> dict[str, Any]:
    """``rows[]/{name,before,now,ratio}`` of every number that both have, and whether they compare."""
    rows = [
        _row(name, before, after)
        for name in (*_RATES, *_steps(now))
        if (before := _number(earlier, name)) is not None and (after := _number(now, name)) is not None
    ]
    same_machine = now["machine"].get("kind") == earlier["machine"].get("kind")
    same_model = now.get("model") == earlier.get("model")
    notes = [] if same_machine else ["the earlier report is of another kind of machine"]
    notes += [] if same_model else ["the earlier report trained something else: steps do not compare"]
    return {"same_machine": same_machine, "same_model": same_model, "rows": rows, "notes": notes}


def _row(name: str, before: float, now: float) -> dict[str, Any]:
    return {"name": name, "before": before, "now": now, "ratio": now / before if before else None}


def _steps(told: Told) -> list[str]:
    return [f"ab/{row['name']}/step_s" for row in told["ab"]]


def _number(told: Told, name: str) -> float | None:
    first, *rest = name.split("/")
    value: Any = told.get(first)
    if first == "ab":
        value = {row["name"]: row for row in told["ab"]}
    for part in rest:
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def calibrate(told: Told, machine: Machine) -> list[str]:
    """Have plans for this machine use what was measured; returns what they learned. Emulated rates teach nothing."""
    if told["emulated"] or not machine.has_device:
        return []
    found = {name: rate for name, rate in _learned(told).items() if rate is not None}
    remember_rates(machine, found, "gh200 prove")
    beside = ((told["questions"] or {}).get("5") or {}).get("beside_torch_bytes")
    if isinstance(beside, int) and beside > 0:
        remember_context(machine, beside, "gh200 prove")
        return [*found, "context"]
    return list(found)


def _learned(told: Told) -> dict[str, float | None]:
    """By the names of a machine's rates, in bytes per second."""
    answers = ((told["questions"] or {}).get("2") or {}).values()
    in_place = [answer["read"] for answer in answers if isinstance(answer, Mapping)]
    found = {"h2d": _number(told, "link/h2d"), "d2h": _number(told, "link/d2h")}
    rates = {**found, "in_place": max(in_place, default=None)}
    return {name: None if rate is None else rate * GB for name, rate in rates.items()}
