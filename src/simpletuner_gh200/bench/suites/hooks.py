"""What the extension costs: an interpreter start with our ``.pth`` in place, and each training step.

A step is that of a stand-in trainer which does nothing, bare and with telemetry recording through the real seams: what
is measured is our wrapping and recording alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import simpletuner_gh200
from simpletuner_gh200.bench.samples import training_step
from simpletuner_gh200.bench.suite import Suite, measure
from simpletuner_gh200.config.environment import SWITCH, for_child
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.seams.features.telemetry.feature import TelemetryFeature
from simpletuner_gh200.seams.loop import LoopWatch
from simpletuner_gh200.seams.points.trainer import extend_log
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON

PTH_LINE = (
    'import os, sys; gh200 = type(sys)("simpletuner.gh200"); '
    "gh200.__getattr__ = lambda name: getattr(object(), name) "
    'if name[:2] == "__" and name not in ("__path__", "__all__") '
    'else __import__("simpletuner_gh200.compat.older_names", fromlist=["x"]).answer(name); '
    'sys.modules.setdefault("simpletuner.gh200", gh200); '
    '(os.environ.get("SIMPLETUNER_GH200") == "1" or "simpletuner/train.py" in " ".join(sys.orig_argv[1:4])) and '
    '__import__("simpletuner_gh200.startup", fromlist=["x"]).begin()\n'
)
"""The line of simpletuner_gh200.pth; a test keeps the two the same."""


def measure_hooks(quick: bool, _samples: int | None) -> dict[str, Any]:
    repeats = 5 if quick else 15
    startup = _startup(repeats)
    per_step = seconds_per_step(200 if quick else 2_000, repeats)
    # Forward and backward of the demo's UNet at batch 2: a step no real training is shorter than.
    step = measure({"step": training_step(side=8)}, repeats=repeats).wall["step"]
    return {
        "startup_ms_off": (startup["off"] - startup["without"]) * 1000,
        "startup_ms_on": (startup["on"] - startup["without"]) * 1000,
        "per_step_us": per_step * 1e6,
        "step_share": per_step / step,
    }


def _startup(repeats: int) -> dict[str, float]:
    """Interpreter starts over a site folder without our .pth, with it and off, with it and on."""
    with tempfile.TemporaryDirectory() as without, tempfile.TemporaryDirectory() as with_pth:
        Path(with_pth, "simpletuner_gh200.pth").write_text(PTH_LINE, encoding="utf-8")
        package = str(Path(simpletuner_gh200.__file__).parents[1])
        dependencies = next((path for path in sys.path if path.endswith("site-packages")), "")
        paths = os.pathsep.join((package, dependencies))

        def start(folder: str, switch: str | None) -> Callable[[], object]:
            environment = for_child({"PYTHONPATH": paths}, without=(SWITCH,)) | ({SWITCH: switch} if switch else {})
            code = f"import site; site.addsitedir({folder!r})"
            return lambda: subprocess.run([sys.executable, "-S", "-c", code], env=environment, check=True)

        subjects = {"without": start(without, None), "off": start(with_pth, None), "on": start(with_pth, "1")}
        return measure(subjects, repeats=repeats).wall


class _Accelerator:
    is_main_process = True
    num_processes = 1
    process_index = 0
    device = SimpleNamespace(type="cpu", index=None)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """A tracker that keeps nothing."""

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        yield


class _Trainer:
    """What happens once a step in SimpleTuner's loop, with nothing behind it."""

    def __init__(self, output: str) -> None:
        self.accelerator = _Accelerator()
        self.config = SimpleNamespace(output_dir=output, max_train_steps=1)
        self.state = {"global_step": 0}

    def _exit_on_signal(self) -> None:
        """Nobody asked to stop."""

    def prepare_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def _emit_event(self, event: dict[str, Any], message_level: str = "info") -> bool:
        return True

    def steps(self, count: int) -> None:
        event = {"type": "training.status", "progress": {"metrics": {}}}
        for number in range(count):
            self._exit_on_signal()
            self.prepare_batch({"latents": (0, 1)})
            with self.accelerator.accumulate():
                pass
            self.accelerator.log({"train_loss": 0.5, "learning_rate": 1e-4, "epoch": 1}, step=number)
            self._emit_event(event)


def seconds_per_step(steps: int, repeats: int) -> float:
    """What a step with telemetry on takes beyond a bare one."""
    with tempfile.TemporaryDirectory() as folder:
        bare = _Trainer(folder)
        recording, close = _recording(folder)
        try:
            subjects = {"bare": lambda: bare.steps(steps), "recording": lambda: recording.steps(steps)}
            seconds = measure(subjects, repeats=repeats).wall
        finally:
            close()
    return max(0.0, seconds["recording"] - seconds["bare"]) / steps


def _recording(output: str) -> tuple[_Trainer, Callable[[], None]]:
    """A trainer of a class of its own with the real seams on it, and what ends its telemetry."""
    module = ModuleType("stand_in")
    module.Trainer = type("Trainer", (_Trainer,), dict(vars(_Trainer)))  # type: ignore[attr-defined]
    runtime = Runtime(Launch())
    telemetry = TelemetryFeature()
    telemetry.runtime, runtime.features = runtime, (telemetry,)
    for seam in runtime.seams.values():
        seam.status = ON
    runtime.configure(resolve({"gh200_optimizations": {"enable_uvm_hints": False}}, {}))
    for name in ("trainer.prepare_batch", "trainer.emit_event"):
        for patch in runtime.seams[name].seam.patches(module, runtime):
            patch.install()
    trainer: _Trainer = module.Trainer(output)
    runtime.trainer = trainer
    extend_log(trainer.accelerator, runtime)
    LoopWatch(trainer, runtime).install()
    runtime.call("before_train", trainer)
    return trainer, runtime.close


SUITE = Suite("hooks", "What the extension costs at interpreter start and per training step.", measure_hooks)
