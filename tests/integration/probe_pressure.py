"""Show the run a machine that has no memory left: the watch reads /proc below this folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any


def install(record: dict[str, Any]) -> None:
    from simpletuner_gh200.seams.features import pressure

    root = Path(tempfile.mkdtemp(dir=os.environ["GH200_TEST_FOLDER"]))
    (root / "proc").mkdir()
    (root / "proc" / "meminfo").write_text("MemTotal: 100000000 kB\nMemFree: 1000 kB\nMemAvailable: 1000 kB\n")
    pressure.PressureFeature.root = root
    pressure.EVERY_SECONDS = 0.01
    if "GH200_TEST_ONE_POOL" in os.environ:  # a machine that no CPU can stand in for
        pressure.detect.single_pool = lambda: True
