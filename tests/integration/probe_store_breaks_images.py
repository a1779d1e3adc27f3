"""Images break between SimpleTuner's own look at them and the staging, which goes on while training runs."""

from __future__ import annotations

import os
from pathlib import Path


def install(record: dict) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    from simpletuner_gh200.held.stager import BatchStager

    original = BatchStager.stage

    def stage(self, batch):
        for path in map(os.fsdecode, batch.paths()):
            if path.endswith(".png"):
                Path(path).write_bytes(b"no image any more")
        original(self, batch)

    BatchStager.stage = stage
