"""Runs of ``gh200 prove`` that train nothing, and leave what a run would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpletuner_gh200.bench.prove.arms import Arm, Subject, arms
from simpletuner_gh200.bench.prove.comparing import Train

TINY = arms(tiny=True, full=False)
BY_NAME = {arm.name: arm for arm in TINY}
TOKEN = "hf_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7"


def summary(arm: Arm, **changed: Any) -> dict[str, Any]:
    """What a run of the arm leaves where it did what it says."""
    details = {
        "caches": {"vae": {"hits": 5}, "text": {"hits": 5}},
        "state": {"tensors": 3, "bytes": 4096, "mechanism": "host"},
        "activations": {"tensors": 2, "saved": 200, "moved": 100},
    }
    features = {name: "on" if name == arm.feature else "off: not asked for" for name in details}
    found = {"status": "completed", "global_step": 8, "reason": None, "features": features}
    return {**found, "details": {name: details[name] for name in details if name == arm.feature}, **changed}


def training(change: Callable[[Arm, dict[str, Any]], dict[str, Any] | None] = lambda _arm, told: told) -> Train:
    """Trains nothing, and leaves what a run would: telemetry, a log, a summary."""

    def train(config: Path, log: Path) -> dict[str, Any] | None:
        values = json.loads(config.read_text())
        arm = BY_NAME[config.parent.name]
        log.write_text(f"starting\nHF_TOKEN={TOKEN}\n")
        written = Path(values["output_dir"], "gh200", "telemetry.jsonl")
        written.parent.mkdir(parents=True)
        seconds = 0.5 if arm.name == "caches" else 1.0
        steps = [9.0, 9.0, *[seconds] * (values["max_train_steps"] - 2)][: values["max_train_steps"]]
        lines = [
            {"kind": "step", "step": number + 1, "step_seconds": taken, "data_wait_seconds": taken / 10}
            | {"device": {"reserved": 1000 + number}}
            for number, taken in enumerate(steps)
        ]
        written.write_text("\n".join(json.dumps(line) for line in lines))
        return change(arm, summary(arm))

    return train


def subject(**values: Any) -> Subject:
    return Subject("nothing", {"model_family": "sdxl", "model_type": "lora", **values}, [{"id": "a"}], tiny=True)
