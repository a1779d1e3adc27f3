"""The whole of ``gh200 prove``: the machine examined and measured, then runs compared, as one object to send back."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm, arms, left_out
from simpletuner_gh200.bench.prove.rounds import MOST_ROUNDS, Compared, compare
from simpletuner_gh200.bench.prove.subject import Subject
from simpletuner_gh200.bench.prove.trials import Train, Trial, by_command, trial
from simpletuner_gh200.config.environment import text
from simpletuner_gh200.diagnostics.context import Context
from simpletuner_gh200.diagnostics.examine import Examination, examine
from simpletuner_gh200.diagnostics.selftest.bench import measure_machine, nothing_measured
from simpletuner_gh200.diagnostics.selftest.run import SelfTest, selftest, without_paths
from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.memory.driver.interface import Driver
from simpletuner_gh200.telemetry.redact import redact

SCHEMA = 1
STEPS = 8
_NAMING = ("host", "date")
"""Fields of a machine that say which one it is, or when."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    examination: Examination
    tested: SelfTest
    measured: Mapping[str, Any]
    compared: Compared
    subject: Subject
    minutes: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Did the self-test and every run that was tried do what they promise? What the doctor finds is advice."""
        return self.tested.ok and not self.compared.failed and bool(self.compared.trials)

    def to_json(self) -> dict[str, Any]:
        tested, doctor = self.tested.to_json(), self.examination.to_json()
        told = {
            "schema": SCHEMA,
            "version": tested["version"],
            "ok": self.ok,
            "complete": not self.compared.out_of_time,
            "minutes": self.minutes,
            "seconds": round(self.seconds, 1),
            "emulated": self.tested.emulated,
            "machine": machine_json(doctor["machine"]),
            "doctor": {
                "summary": doctor["summary"],
                "checks": [{key: row[key] for key in ("code", "what", "status", "found")} for row in doctor["checks"]],
            },
            "selftest": {key: tested[key] for key in ("summary", "checks", "measured", "libraries")},
            **self.measured,
            "model": self.subject.to_json(),
            "rounds": self.compared.rounds,
            "ab": self.compared.to_json(),
            "notes": list(self.notes),
        }
        cleaned: dict[str, Any] = nameless(json.loads(without_paths(json.dumps(redact(told)))), whose())
        return cleaned

    @property
    def notes(self) -> list[str]:
        found = list(self.compared.notes)
        if self.compared.out_of_time:
            found.append(f"without a run for want of time: {', '.join(self.compared.out_of_time)}; see --minutes")
        if self.tested.emulated:
            found.append("the device is emulated: its rates are made up")
        if not self.examination.machine.get("gpus"):
            found.append("no GPU: host memory stood in for Grace, and nothing of a link could be measured")
        return found


def nameless(told: Any, names: Sequence[str]) -> Any:
    """Libraries say in their last words whose machine it was: its name and its user's are taken out of free text."""
    if isinstance(told, Mapping):
        return {
            key: _blotted(value, names) if key in _FREE_TEXT else nameless(value, names) for key, value in told.items()
        }
    return [nameless(each, names) for each in told] if isinstance(told, list) else told


def _blotted(words: Any, names: Sequence[str]) -> Any:
    if isinstance(words, list):
        return [_blotted(each, names) for each in words]
    for name in names if isinstance(words, str) else ():
        words = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", words)
    return words


def whose() -> list[str]:
    """The longest first; not what half of all machines and users are called."""
    host = platform.node()
    found = {host, host.partition(".")[0], text("USER"), text("LOGNAME")}
    return sorted((name for name in found if len(name) > 2 and name not in _COMMON), key=len, reverse=True)


_FREE_TEXT = ("told", "found", "notes")
_COMMON = ("localhost", "root", "user", "ubuntu", "gh200", "grace", "hopper")


def machine_json(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What kind of machine it is, and nothing that tells it from its neighbours; ``kind`` is the same for all alike."""
    kept = {key: value for key, value in machine.items() if key not in _NAMING}
    kept["gpus"] = [
        {key: value for key, value in gpu.items() if key != "pci_address"} for gpu in machine.get("gpus") or []
    ]
    if isinstance(kept.get("memory"), Mapping):
        kept["memory"] = {"total_bytes": kept["memory"].get("total_bytes")}
    alike = {key: kept.get(key) for key in ("architecture", "page_bytes", "cores", "gpus")}
    kept["kind"] = hashlib.blake2b(json.dumps(alike, sort_keys=True).encode(), digest_size=6).hexdigest()
    return kept


def prove(
    subject: Callable[[], Subject],
    folder: Path,
    *,
    minutes: float,
    steps: int = STEPS,
    rounds: int = MOST_ROUNDS,
    train: Train = by_command,
    context: Context | None = None,
    tell: Tell = lambda _words: None,
) -> Proof:
    """Examine, measure, compare in ``rounds`` or fewer. Runs are below ``folder``; ``train`` trains one of them."""
    started = time.monotonic()
    context = context or Context()
    tell("examining the machine")
    examination = examine(context)
    tell("testing the memory room")
    tested = selftest(context.driver)
    tell("measuring the link and the ways to Grace memory")
    measured, notes = _measured(context.driver)
    tell("preparing what is trained")
    trained = subject()
    chosen = arms(tiny=trained.tiny, full=trained.full)
    gpu = context.torch is not None and context.torch.cuda is not None and context.has_device and not tested.emulated
    options = frozenset(_options(context))
    family = trained.values.get("model_family")
    reasons = {arm.name: left_out(arm, options=options, gpu=gpu, family=family) for arm in chosen}
    without = {name: why for name, why in reasons.items() if why is not None}

    def run(arm: Arm, length: int = steps) -> Trial:
        return trial(arm, trained.write(arm, folder / "runs" / arm.name, steps=length), length, train)

    tell("a first run, which fills SimpleTuner's caches and counts for nothing")
    first = run(chosen[0], 1)
    left = 60 * minutes - (time.monotonic() - started)
    if first.ok:
        compared = compare(chosen, without, run, seconds=left, longest=first.seconds, most=rounds, tell=tell)
    else:
        compared = Compared(chosen, {"stock": [first]}, without, notes=["the first run failed: no arm was tried"])
    compared.notes += notes
    return Proof(examination, tested, measured, compared, trained, minutes, time.monotonic() - started)


def _measured(driver: Driver) -> tuple[dict[str, Any], list[str]]:
    """Rates and answers, and why there are none where the device refuses: somebody else may have filled it."""
    try:
        return measure_machine(driver), []
    except GH200Error as refused:
        return nothing_measured(), [f"rates could not be measured: {refused.message}"]


def _options(context: Context) -> list[str]:
    """Names of the installed release's options; none where they can't be read, which leaves nothing out."""
    table = context.simpletuner.table
    return [] if table is None else list(table.options)
