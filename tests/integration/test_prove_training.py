"""``gh200 prove``: every arm that a machine without a GPU can try really trains, and shows what was on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner_gh200.bench.prove.arms import Subject
from simpletuner_gh200.bench.prove.comparing import Train
from simpletuner_gh200.bench.prove.proof import prove
from simpletuner_gh200.config.environment import TELEMETRY
from simpletuner_gh200.demo.project import dataset_list, training_config
from tests.integration.workbench import Workbench

TRAINED = ("stock", "caches", "state", "activations", "recompute")


def by_forge(workbench: Workbench) -> Train:
    """As ``gh200 train`` would, from a process that has imported SimpleTuner already."""

    def train(config: Path, log: Path) -> dict[str, Any] | None:
        run = workbench.train(argv=["--config", str(config)], env={TELEMETRY: "1"})
        log.write_text(run.log())
        return run.summaries[0] if run.ok and "status" in run.summaries[0] else None

    return train


@pytest.mark.matrix  # each arm alone is in the tests of its feature
@pytest.mark.one_release("4.")
def test_every_arm_trains(workbench, tmp_path):
    project = workbench.project
    tiny = Subject("the tiny SDXL", training_config(project), dataset_list(project, {}), tiny=True)
    found = prove(lambda: tiny, tmp_path, minutes=60, steps=3, rounds=1, train=by_forge(workbench))
    rows = {row["name"]: row for row in found["ab"]}
    assert {name: rows[name]["status"] for name in TRAINED} == dict.fromkeys(TRAINED, "ok"), rows
    assert {row["status"] for name, row in rows.items() if name not in TRAINED} == {"skip"}
    assert all(rows[name]["step_s"] > 0 for name in TRAINED)
    assert "samples came from slabs" in rows["caches"]["told"]
    assert "tensors" in rows["state"]["told"]
    assert "bytes moved" in rows["activations"]["told"]
    assert found["ok"]
