"""The demo: make the tiny project, train it through ``gh200 train``, and say truthfully what came of it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import NO_BYTECODE, SUMMARY_FOLDER, for_child
from simpletuner_gh200.demo.project import DemoProject, write_project_in_subprocess
from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate.ending import Line, closing_lines
from simpletuner_gh200.seams.seam import WAITING

LOG = "training.log"
MARKER = ".gh200-demo"

BLOCKS = {
    # Filled at the start: that is quick here, and nothing is read from disk while it trains.
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"},
    "gh200_optimizations": {
        "enable_uvm_hints": True,
        # By name and from the first byte, so that a machine without a GPU shows it too.
        "activations": "grace",
        "activation_min_tensor_kb": 0,
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 2,
        "target_effective_batch_size": 8,
        "batch_rampup_steps": 32,
    },
}
DATASET = {"type": "in_memory", "in_memory": {"compression": "auto", "wait": True}}
"""What the demo has on: a block of each kind."""


@dataclass(frozen=True)
class DemoResult:
    """What ran and what it left."""

    project: DemoProject
    summary: Mapping[str, Any]
    checkpoint: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        # The contract names the caches' part "cache"; the feature carries the name of its configuration part.
        details = {("cache" if name == "caches" else name): part for name, part in self.summary["details"].items()}
        return {
            "simpletuner": importlib.metadata.version("simpletuner"),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "global_step": self.summary["global_step"],
            "checkpoint": str(self.checkpoint),
            "seconds": self.seconds,
            "seams": self.summary["seams"],
            "features": self.summary["features"],
            **details,
        }


def run_demo(folder: Path, *, steps: int) -> DemoResult:
    """Train ``steps`` steps in ``folder``; raises RunFailed with the reason when they were not reached."""
    started = time.perf_counter()
    project = DemoProject(folder.absolute(), steps=steps)
    _claim(project.folder)
    shutil.rmtree(project.output, ignore_errors=True)  # a second run trains again; model, images and caches stay
    write_project_in_subprocess(project, BLOCKS, DATASET)
    prepared = time.perf_counter()
    log = project.folder / LOG
    summary = train_by_command(project.config, log, folder=project.folder)
    if summary is None:
        raise RunFailed("training left no summary", remedy=f"see {log}")
    total = round(time.perf_counter() - started, 3)
    seconds = {"prepare": round(prepared - started, 3), **summary.get("seconds", {})}
    seconds["process"] = round(total - sum(seconds.values()), 3)
    checkpoint = project.output / f"checkpoint-{steps}"
    if summary["status"] != "completed" or summary["global_step"] < steps or not checkpoint.is_dir():
        raise RunFailed(
            f"the demo reached step {summary['global_step']} of {steps}: {summary['reason'] or summary['status']}",
            remedy=f"see {log}",
        )
    return DemoResult(project, summary, checkpoint, {**seconds, "total": total})


def _claim(folder: Path) -> None:
    """The demo deletes its own output, so it works only in a folder that is new, empty, or marked as its own."""
    marker = folder / MARKER
    if folder.exists() and any(folder.iterdir()) and not marker.is_file():
        raise UsageError(f"{folder} holds something that is not the demo's", remedy="name a new folder with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()


def train_by_command(
    config: Path,
    log: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    folder: Path | None = None,
) -> dict[str, Any] | None:
    """Train through the command that users type; what its first rank left, None where it left nothing.

    Its output goes to ``log``. ``folder``: where it is started.
    """
    command = [sys.executable, "-m", "simpletuner_gh200", "train", "--config", str(config), *options]
    # Without bytecode SimpleTuner takes a minute more.
    without = (NO_BYTECODE, *without)
    with tempfile.TemporaryDirectory(prefix="gh200-run-") as kept, log.open("w", encoding="utf-8") as file:
        added = {"TOKENIZERS_PARALLELISM": "false", SUMMARY_FOLDER: kept, **(environment or {})}
        child = for_child(added, without=without)
        subprocess.run(command, env=child, cwd=folder, stdout=file, stderr=subprocess.STDOUT, check=False)
        left = sorted(Path(kept).glob("rank-*.json"))
        return json.loads(left[0].read_text(encoding="utf-8")) if left else None


# -- what people see -------------------------------------------------------------------------------------------------


def summary_lines(result: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Line]:
    """(label, text) pairs from the demo's JSON and the summary of the run behind it."""
    versions = f"SimpleTuner {result['simpletuner']}, torch {result['torch']}, Python {result['python']}"
    # A place in a module that no training imports, as those of the Web UI, is not lost.
    lost = [(name, status) for name, status in result["seams"].items() if status not in ("ok", str(WAITING))]
    return [
        ("ran", f"{versions}: a LoRA on a tiny SDXL"),
        *closing_lines({**summary, "seconds": result["seconds"]}),
        *(("seam", f"{name} is {status}") for name, status in lost),
    ]
