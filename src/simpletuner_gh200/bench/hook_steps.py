"""The cost of our hooks in one training step: the same stand-in loop, bare, with seams, and with telemetry recording.

The stand-ins do nothing, so what is measured is our wrapping and recording alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from simpletuner_gh200.bench.suite import interleaved
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.features.telemetry.feature import TelemetryFeature
from simpletuner_gh200.seams.points.trainer import extend_log
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON


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


def seconds_per_step(steps: int, repeats: int) -> dict[str, float]:
    """Extra seconds per step of the seams with every feature off, and of seams with telemetry on."""
    with tempfile.TemporaryDirectory() as folder:
        bare = _Trainer(folder)
        passing, _ = _hooked(str(Path(folder, "off")), ())
        recording, close = _hooked(str(Path(folder, "on")), (TelemetryFeature(),))
        try:
            taken = interleaved(
                {"bare": _run(bare, steps), "seams": _run(passing, steps), "telemetry": _run(recording, steps)},
                repeats=repeats,
            )
        finally:
            close()
    return {name: max(0.0, taken[name] - taken["bare"]) / steps for name in ("seams", "telemetry")}


def _run(trainer: Any, steps: int) -> Callable[[], None]:
    return lambda: trainer.steps(steps)


def _hooked(output: str, features: tuple[Feature, ...]) -> tuple[Any, Callable[[], None]]:
    """A trainer of a class of its own with the real seams on it; and what ends its features."""
    kind = type("Trainer", (_Trainer,), dict(vars(_Trainer)))
    module = ModuleType("stand_in")
    module.Trainer = kind  # type: ignore[attr-defined]
    runtime = Runtime(Launch())
    runtime.features = features
    for seam in runtime.seams.values():
        seam.status = ON
    for feature in features:
        feature.runtime = runtime
    runtime.configure(resolve({"gh200_optimizations": {"enable_uvm_hints": False}}, {}))
    for name in ("trainer.prepare_batch", "trainer.emit_event"):
        for patch in runtime.seams[name].seam.patches(module, runtime):
            patch.install()
    trainer = kind(output)
    runtime.trainer = trainer
    extend_log(trainer.accelerator, runtime)
    runtime.call("before_train", trainer)
    return trainer, runtime.close
