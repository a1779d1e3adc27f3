"""The whole of ``gh200 prove``: the machine examined and measured, then runs compared, as one object to send back."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm, Subject, arms
from simpletuner_gh200.bench.prove.comparing import MOST_ROUNDS, Compared, Train, Trial, by_command, compare, trial
from simpletuner_gh200.config.environment import text
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import examine
from simpletuner_gh200.diagnostics.selftest.bench import measure_machine, nothing_measured
from simpletuner_gh200.diagnostics.selftest.run import selftest, without_paths
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.plan.calibration import remember
from simpletuner_gh200.plan.machines import Machine
from simpletuner_gh200.telemetry.redact import redact

SCHEMA = 1
STEPS = 8
GB = 10**9

Proof = Mapping[str, Any]
"""As it is written."""


def prove(
    subject: Callable[[], Subject],
    folder: Path,
    *,
    minutes: float,
    steps: int = STEPS,
    rounds: int = MOST_ROUNDS,
    train: Train = by_command,
    context: Context | None = None,
    report: Callable[[str], None] = lambda _words: None,
) -> dict[str, Any]:
    """Examine, measure, compare in ``rounds`` or fewer. Runs are below ``folder``; ``train`` trains one of them."""
    started = time.monotonic()
    context = context or Context()
    report("examining the machine")
    examination = examine(context)
    report("testing the memory room")
    tested = selftest(context.driver)
    report("measuring the link and the ways to Grace memory")
    measured, notes = _measured(context.driver)
    report("preparing what is trained")
    trained = subject()
    chosen = arms(tiny=trained.tiny, full=trained.full)
    gpu = context.torch is not None and context.torch.cuda is not None and context.has_device and not tested.emulated
    table = context.simpletuner.table
    here: dict[str, Any] = {"options": frozenset(table.options if table else ()), "gpu": gpu}
    reasons = {arm.name: arm.left_out(**here, family=trained.values.get("model_family")) for arm in chosen}
    without = {name: why for name, why in reasons.items() if why is not None}

    def run(arm: Arm, length: int = steps) -> Trial:
        return trial(arm, trained.write(arm, folder / "runs" / arm.name, steps=length), length, train)

    report("a first run, which fills SimpleTuner's caches and counts for nothing")
    first = run(chosen[0], 1)
    if first.ok:
        left = 60 * minutes - (time.monotonic() - started)
        found = compare(chosen, without, run, seconds=left, longest=first.seconds, most=rounds, report=report)
    else:
        found = Compared(chosen, {"stock": [first]}, without, notes=["the first run failed: no arm was tried"])
    test, doctor = tested.to_json(), examination.to_json()
    proof = {
        "schema": SCHEMA,
        "version": test["version"],
        # What the doctor finds is advice.
        "ok": tested.ok and not found.failed and bool(found.trials),
        "complete": not found.out_of_time,
        "minutes": minutes,
        "seconds": round(time.monotonic() - started, 1),
        "emulated": tested.emulated,
        "machine": machine_json(doctor["machine"]),
        "doctor": {
            "summary": doctor["summary"],
            "checks": [{key: row[key] for key in ("code", "what", "status", "found")} for row in doctor["checks"]],
        },
        "selftest": {key: test[key] for key in ("summary", "checks", "libraries")},
        **measured,
        "model": trained.to_json(),
        "rounds": found.rounds,
        "ab": [found.row(arm) for arm in chosen],
        "notes": [*found.notes, *notes, *_limits(found, tested.emulated, bool(examination.machine.get("gpus")))],
    }
    cleaned: dict[str, Any] = nameless(json.loads(without_paths(json.dumps(redact(proof)))), owner_names())
    return cleaned


def _measured(driver: Driver) -> tuple[dict[str, Any], list[str]]:
    """Rates and answers, and why there are none where the device refuses: somebody else may have filled it."""
    try:
        return measure_machine(driver), []
    except GH200Error as refused:
        return nothing_measured(), [f"rates could not be measured: {refused.message}"]


def _limits(found: Compared, emulated: bool, gpus: bool) -> list[str]:
    notes = []
    if found.out_of_time:
        notes.append(f"without a run for want of time: {', '.join(found.out_of_time)}; see --minutes")
    if emulated:
        notes.append("the device is emulated: its rates are made up")
    if not gpus:
        notes.append("no GPU: host memory stood in for Grace, and nothing of a link could be measured")
    return notes


# -- nothing that tells whose machine it was -------------------------------------------------------------------------

_FREE_TEXT = ("told", "found", "notes")
_COMMON = ("localhost", "root", "user", "ubuntu", "gh200", "grace", "hopper")


def nameless(value: Any, names: Sequence[str], *, free_text: bool = False) -> Any:
    """Libraries name the machine and its user in their last words: both are taken out of free text."""
    if isinstance(value, Mapping):
        return {key: nameless(each, names, free_text=key in _FREE_TEXT) for key, each in value.items()}
    if isinstance(value, list):
        return [nameless(each, names, free_text=free_text) for each in value]
    for name in names if free_text and isinstance(value, str) else ():
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", value)
    return value


def owner_names() -> list[str]:
    """The longest first; not what half of all machines and users are called."""
    host = platform.node()
    found = {host, host.partition(".")[0], text("USER"), text("LOGNAME")}
    return sorted((name for name in found if len(name) > 2 and name not in _COMMON), key=len, reverse=True)


def machine_json(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What kind of machine it is, and nothing that tells it from its neighbours."""
    kept = {key: value for key, value in machine.items() if key not in ("host", "date")}
    if isinstance(kept.get("memory"), Mapping):
        kept["memory"] = {"total_bytes": kept["memory"].get("total_bytes")}
    return kept


# -- what plans learn from it -------------------------------------------------------------------------------------


def calibrate(proof: Proof, machine: Machine) -> list[str]:
    """Have plans for this machine use what was measured; returns what they learned. Emulated rates teach nothing."""
    if proof["emulated"] or not machine.has_device:
        return []
    questions = proof["questions"] or {}
    ways = (questions.get("2") or {}).values()
    in_place = max((way["read"] for way in ways if isinstance(way, Mapping)), default=None)
    rates = {**proof["link"], "in_place": in_place}
    found = {name: rate * GB for name, rate in rates.items() if rate is not None}
    besides = (questions.get("5") or {}).get("beside_torch_bytes")
    if isinstance(besides, int) and besides > 0:
        found["context"] = besides
    remember(machine, found, "gh200 prove")
    return list(found)
