"""Real runs of SimpleTuner, stock and ours, timed from outside: when each of its log lines came.

SimpleTuner is imported once, in a server process; every run is a fork of it, so that a short run is not mostly imports.
Nothing of ours is active in the server: a stock run is stock, but for the stand-in that a machine without CUDA needs.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.config.environment import NO_BYTECODE, for_child
from simpletuner_gh200.demo.project import DemoProject, dataset_list, training_config
from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.memory.host import cpu_seconds

FIRST_STEP = "gh200-bench: first optimizer step"
"""Written into the log by the run itself."""
STEP = "gh200-bench: an optimizer step"
"""After each of them, in runs in which somebody looks for it."""
LONGEST_RUN = 3600.0


@dataclass(frozen=True)
class Timed:
    """When a run's log first had each mark: seconds since its start, and CPU seconds of its process until then."""

    wall: Mapping[str, float]
    cpu: Mapping[str, float]
    every: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds at each time that it had the mark."""
    end: float = 0.0
    """Seconds until the process had ended."""


class RunServer:
    """Starts runs; ``with`` ends it."""

    def __init__(self) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        on_cpu = {"ACCELERATE_USE_CPU": "true", "SIMPLETUNER_LOG_LEVEL": "INFO"}
        environment = for_child({**one_thread, **on_cpu}, without=(NO_BYTECODE,))
        code = "from simpletuner_gh200.bench.runs import serve; serve()"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._answer()

    def run(
        self, config: Path, log: Path, marks: Sequence[str], *, stock: bool, disk_rate: float | None = None
    ) -> Timed:
        """Train what ``config`` says; its output goes to ``log``, in which every mark must come.

        ``disk_rate``: bytes per second that checkpoints are to be written at, where no disk is as slow.
        """
        assert self._server.stdin is not None
        job = {"config": str(config), "log": str(log), "marks": marks, "stock": stock, "disk_rate": disk_rate}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = self._answer()
        if answer["code"] or not set(marks) <= answer["wall"].keys():
            end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RunFailed(f"a run of the benchmark failed (exit code {answer['code']}): {end}")
        return Timed(answer["wall"], answer["cpu"], answer["every"], answer["end"])

    def start(
        self, project: DemoProject, name: str, marks: Sequence[str], cache_config: Mapping[str, Any] | None
    ) -> Timed:
        """A start of ``project``: stock where there is no ``cache_config``, else with it and the data in memory."""
        shutil.rmtree(project.output, ignore_errors=True)
        data: dict[str, Any] = {} if cache_config is None else {"type": "in_memory", "in_memory": {}}
        project.datasets.write_text(json.dumps(dataset_list(project, data)), encoding="utf-8")
        config = {**training_config(project), "checkpoint_step_interval": 1_000_000}
        config |= {} if cache_config is None else {"cache_config": dict(cache_config)}
        project.config.write_text(json.dumps(config), encoding="utf-8")
        return self.run(project.config, project.folder / f"{name}.log", marks, stock=cache_config is None)

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RunFailed("SimpleTuner could not be imported for the benchmark", remedy="gh200 doctor")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> RunServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def serve() -> None:
    """In the server: one JSON job per line of standard input, one JSON answer each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SimpleTuner prints while it is imported must not mix with the answers
    for name in ("torch._inductor.cudagraph_trees", "torchsde", "datasets"):  # asked for later, but then always
        with suppress(ImportError):
            importlib.import_module(name)
    for name in ("simpletuner.helpers.training.trainer", "simpletuner.helpers.data_backend.factory"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_timed(json.loads(line))) + "\n")
        answers.flush()


def _timed(job: Mapping[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become(job, writing)
    os.close(writing)
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    every: dict[str, list[float]] = {mark: [] for mark in job["marks"]}
    with os.fdopen(reading, "rb") as lines, open(job["log"], "wb") as log:
        for line in lines:
            now = time.monotonic() - started
            log.write(b"%9.3f %s" % (now, line))
            for mark in job["marks"]:
                if mark.encode() in line:
                    every[mark].append(now)
                    if mark not in wall:
                        wall[mark], cpu[mark] = now, cpu_seconds(child)
            if now > LONGEST_RUN:
                os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    end = time.monotonic() - started
    return {"code": os.waitstatus_to_exitcode(status), "wall": wall, "cpu": cpu, "every": every, "end": end}


def _become(job: Mapping[str, Any], output: int) -> None:
    """In the child: train, and never return into the server."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(Path(job["config"]).parent)
        _mark_steps(every=STEP in job["marks"])
        if job["disk_rate"] is not None:
            _brake(job["disk_rate"], stock=job["stock"])
        code = _train(job)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:  # noqa: BLE001 - said in full in the log; the exit code tells the rest
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _mark_steps(*, every: bool) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    original = AcceleratedOptimizer.step
    words = FIRST_STEP

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal words
        result = original(self, *args, **kwargs)
        os.write(2, f"{words}\n".encode())
        words = STEP
        if not every:
            AcceleratedOptimizer.step = original
        return result

    AcceleratedOptimizer.step = step


def _brake(rate: float, *, stock: bool) -> None:
    """Make checkpoints as slow as a disk of this rate would: stock's saving lasts as long, ours drains so."""
    if not stock:
        from simpletuner_gh200.held.saved import Order
        from simpletuner_gh200.seams.features.behind import feature as behind

        vars(behind)["Order"] = functools.partial(Order, rate=rate)
        return
    from simpletuner.helpers.training.trainer import Trainer

    original = Trainer.checkpoint_state_save

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        path = original(self, *args, **kwargs)
        size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        time.sleep(max(0.0, began + size / rate - time.monotonic()))
        return path

    Trainer.checkpoint_state_save = save


def _say(words: str) -> None:
    os.write(2, f"{words}\n".encode())


def _train(job: Mapping[str, Any]) -> int:
    if not job["stock"]:
        from simpletuner_gh200.seams.rank import run_rank

        return run_rank(["--config", job["config"]], _say)
    import torch

    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = lambda self, device=None: self
    os.environ["CONFIG_BACKEND"], os.environ["CONFIG_PATH"] = "json", job["config"]
    import simpletuner

    script = str(Path(next(iter(simpletuner.__path__)), "train.py"))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    return 0
