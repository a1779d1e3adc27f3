"""Checkpoints behind the run: what training loses to one, against stock SimpleTuner on the same slow disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from simpletuner_gh200.bench.runs import FIRST_STEP, STEP, RunServer, Timed
from simpletuner_gh200.bench.slow_disk import SlowDisk, slow_disk
from simpletuner_gh200.bench.suite import Suite
from simpletuner_gh200.demo.project import (
    DemoProject,
    training_config,
    write_model_in_subprocess,
    write_project_in_subprocess,
)
from simpletuner_gh200.units import GIB, MIB

RATE = 300e6
"""Bytes per second of the disk: a share of a busy file system."""
EVERY, CHECKPOINTS, REPEATS = 12, 2, 3
WIDE, QUICK = (256, 640), (16, 32)
"""Channels of the UNet: with Adam's two moments 1.4 GB, and nothing worth writing."""

ON_DISK = " is on disk: "
"""The log's word that the last checkpoint is safe."""


class Loss(NamedTuple):
    """Of one run, in seconds."""

    stalls: list[float]
    """That training lost to each checkpoint."""
    plain: float
    """The median step with no checkpoint near."""
    draining: list[float]
    """Steps while one is drained."""
    whole: float
    """From the first step to the end of the process."""


def measure_checkpoints(quick: bool, _samples: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gh200-bench-") as name:
        folder = Path(name)
        with slow_disk(folder / "disk", RATE, 512 * MIB if quick else 8 * GIB) as disk:
            return _measure(folder, disk, quick)


def _measure(folder: Path, disk: SlowDisk, quick: bool) -> dict[str, Any]:
    every, repeats = (3, 1) if quick else (EVERY, REPEATS)
    project = DemoProject(folder / "project", steps=every * CHECKPOINTS + every // 2)
    write_model_in_subprocess(project.model, QUICK if quick else WIDE)
    write_project_in_subprocess(project, {}, {})
    output = disk.folder / "output"
    losses: dict[str, list[Loss]] = {"stock": [], "behind": []}
    told: list[dict[str, Any]] = []
    with RunServer() as server:
        for repeat in range(-1, repeats):  # the first one fills SimpleTuner's caches
            for kind in losses if repeat >= 0 else ("stock",):
                shutil.rmtree(output, ignore_errors=True)
                _configure(project, output, every, behind=kind == "behind")
                marks = [FIRST_STEP, STEP] + [ON_DISK] * (kind == "behind")
                log = folder / f"{kind}.log"
                run = server.run(project.config, log, marks, stock=kind == "stock", disk_rate=disk.rate)
                if repeat >= 0:
                    losses[kind].append(_loss(run, every))
                if kind == "behind":
                    summary = json.loads((output / "gh200" / "summary.json").read_text(encoding="utf-8"))
                    told.append(summary["details"]["checkpoints"])
        size = sum(path.stat().st_size for path in (output / f"checkpoint-{every}").rglob("*") if path.is_file())
    return _compared(losses["stock"], losses["behind"], told, size, disk)


def _configure(project: DemoProject, output: Path, every: int, *, behind: bool) -> None:
    config = {**training_config(project), "output_dir": str(output), "model_type": "full"}
    config.update(checkpoint_step_interval=every, learning_rate=1e-6)
    if behind:
        config["gh200_optimizations"] = {"checkpoints": "behind"}
    project.config.write_text(json.dumps(config), encoding="utf-8")


def _loss(run: Timed, every: int) -> Loss:
    """From the times at which its steps were done; step numbers begin at 1. Pure."""
    done = [*run.every[FIRST_STEP], *run.every[STEP]]
    safe = list(run.every.get(ON_DISK, ()))
    gaps = dict(enumerate(pairwise(done), 2))
    """Of a step: when the one before it was done, and when it was."""
    saved = [number for number in gaps if (number - 1) % every == 0]  # the step after a checkpoint waits for it
    under_way = [(gaps[number][1], until) for number, until in zip(saved, safe, strict=False)]
    draining, plain = [], []
    for number, (before, after) in gaps.items():
        if any(since <= before and after <= until for since, until in under_way):
            draining.append(after - before)
        elif number not in saved and not any(since < after and before < until for since, until in under_way):
            plain.append(after - before)
    usual = median(plain)
    stalls = [gaps[number][1] - gaps[number][0] - usual for number in saved]
    return Loss(stalls, usual, draining, run.end - done[0])


def _compared(
    stock: list[Loss], ours: list[Loss], told: list[dict[str, Any]], size: int, disk: SlowDisk
) -> dict[str, Any]:
    """Ratios of neighbours, so that what slows the machine slows both."""
    pairs = list(zip(ours, stock, strict=True))
    after = [step / run.plain for run in ours for step in run.draining]
    stalls = {"stock": [s for run in stock for s in run.stalls], "behind": [s for run in ours for s in run.stalls]}
    return {
        "stall_vs_stock": median(median(one.stalls) / median(other.stalls) for one, other in pairs),
        "run_vs_stock": median(one.whole / other.whole for one, other in pairs),
        "steps_after_vs_plain": median(after) if after else None,
        "bytes": size,
        "drain_gb_per_s": median(size * run["behind"] / run["drain_s"] for run in told) / 1e9,
        "disk": disk.how,
        "stall_s": {name: median(found) for name, found in stalls.items()},
        "step_s": median(run.plain for run in stock),
    }


SUITE = Suite(
    "checkpoints",
    "Checkpoints behind the run: time that training loses, against stock on a disk of 300 MB/s.",
    measure_checkpoints,
    needs_simpletuner=True,
)
