"""Local rank 0 dies in the middle of staging, as by the kernel's OOM killer."""

from __future__ import annotations

import os
import signal


def install(record: dict) -> None:
    if os.environ.get("RANK") != "0":
        return
    from simpletuner_gh200.held.stager import BatchStager

    original = BatchStager.stage

    def stage(self, batch):
        original(self, batch)
        os.kill(os.getpid(), signal.SIGKILL)

    BatchStager.stage = stage
