"""Telemetry as a feature: what it adds to trackers and events, and that nothing of its troubles reaches the loop."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.features.telemetry.feature import TelemetryFeature
from simpletuner_gh200.seams.features.telemetry.records import _device_numbers
from simpletuner_gh200.seams.loop import LoopWatch
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.upstream.features import ON
from tests.telemetry_page import undescribed

VALUES = {"train_loss": 0.5, "learning_rate": 1e-4}


class Talkative(Feature):
    """Another feature that has numbers to tell, until it breaks."""

    name = "hints"

    def __init__(self) -> None:
        self.broken = False

    def request(self, settings: Any, environment: Any) -> Any:
        return "auto"

    def telemetry(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("no numbers today")
        return {"images": {"reads": 7, "held_bytes": 2048, "note": "words are no numbers"}}


class Accelerator:
    num_processes = 2
    process_index = 0
    is_main_process = True
    device = SimpleNamespace(type="cpu", index=None)

    @contextmanager
    def accumulate(self, *_models: Any) -> Any:
        yield


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator()
        self.config = SimpleNamespace(output_dir=str(folder), max_train_steps=10)
        self.state = {"global_step": 0}

    def _exit_on_signal(self) -> None:
        """Nobody asked to stop."""


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(runtime, trainer, talkative, step): a run whose loop is turned by calling ``step``."""
    monkeypatch.setenv("SIMPLETUNER_GH200_TELEMETRY", "1")
    runtime, trainer, talkative = Runtime(Launch()), Trainer(tmp_path), Talkative()
    runtime.features = (talkative, TelemetryFeature())
    for feature in runtime.features:
        feature.runtime = runtime
    for seam in runtime.seams.values():
        seam.status = ON
    runtime.configure(resolve({}, {}))
    LoopWatch(trainer, runtime).install()
    runtime.call("before_train", trainer)

    def step(number: int, **more: Any) -> dict[str, Any]:
        trainer._exit_on_signal()
        for prepared in runtime.moment("batch_prepared"):
            prepared(trainer, {"latents": [0, 0, 0]})
        with trainer.accelerator.accumulate():
            pass
        values = {**VALUES, **more}
        runtime.call("step_logged", values, number)
        return values

    yield runtime, trainer, talkative, step
    runtime.close()


def test_a_step_reaches_file_trackers_and_events(loop, tmp_path: Path) -> None:
    runtime, _trainer, _talkative, step = loop
    values = step(1)
    metrics = {"loss": 0.5}
    runtime.call("event_sent", metrics)
    assert values["gh200/effective_batch_size"] == 6
    assert values["gh200/hints/images/reads"] == 7
    assert values["gh200/slab_bytes"] == 2048
    assert not [name for name in values if name.endswith("note")]
    assert {name for name in values if name.startswith("gh200/")} <= metrics.keys()
    (record,) = read_run(tmp_path).steps
    assert (record["effective_batch"], record["micro_batches"], record["loss"]) == (6, 1, 0.5)


def test_every_field_of_a_record_is_described(loop, tmp_path: Path) -> None:
    runtime, _trainer, talkative, step = loop
    talkative.telemetry = dict  # has nothing to tell
    step(1)
    runtime.outcome.status = "completed"
    runtime.close()
    run = read_run(tmp_path)
    records = [run.start, *run.steps, run.end]
    assert [record["kind"] for record in records] == ["start", "step", "end"]
    assert [undescribed(record) for record in records] == [[], [], []]
    assert undescribed({"kind": "step", "host": {"available": 1, "surprise": 2}}) == ["host.surprise"]


def test_other_values_on_their_way_to_trackers_are_left_alone(loop) -> None:
    runtime, _trainer, _talkative, _step = loop
    values = {"validation_image": 1}
    runtime.call("step_logged", values, 3)
    assert values == {"validation_image": 1}


def test_a_number_on_a_device_is_not_waited_for(loop, tmp_path: Path) -> None:
    class OnDevice:
        device = "cuda:0"

        def __float__(self) -> float:
            raise AssertionError("reading it would stall the stream")

    _runtime, _trainer, _talkative, step = loop
    step(1, train_loss=OnDevice())
    assert read_run(tmp_path).steps[0]["loss"] is None


def test_a_feature_that_raises_ends_telemetry_and_not_training(loop, tmp_path: Path, caplog) -> None:
    _runtime, _trainer, talkative, step = loop
    step(1)
    talkative.broken = True
    with caplog.at_level(logging.WARNING):
        for number in range(2, 6):
            assert step(number)["train_loss"] == 0.5
    assert len([entry for entry in caplog.records if "telemetry is off" in entry.message]) == 1
    assert len(read_run(tmp_path).steps) == 1


@pytest.mark.parametrize(
    ("switch", "blocks", "wanted"),
    [
        (None, {}, "off"),
        (None, {"gh200_optimizations": {"enable_uvm_hints": True}}, "auto"),
        ("1", {}, "auto"),
        ("0", {"gh200_optimizations": {"enable_uvm_hints": True}}, "off"),
    ],
)
def test_off_unless_something_of_ours_is_on(switch: str | None, blocks: dict[str, Any], wanted: str) -> None:
    environment = {} if switch is None else {"SIMPLETUNER_GH200_TELEMETRY": switch}
    assert TelemetryFeature().request(resolve(blocks, {}), environment) == wanted


def test_a_switch_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="SIMPLETUNER_GH200_TELEMETRY: 'maybe'"):
        TelemetryFeature().request(resolve({}, {}), {"SIMPLETUNER_GH200_TELEMETRY": "maybe"})


def test_once_broken_thread_and_file_are_still_let_go(loop, monkeypatch) -> None:
    runtime, _trainer, talkative, step = loop
    step(1)
    telemetry = runtime.features[1]
    talkative.broken = True
    step(2)
    assert telemetry.broken
    before = threading.active_count()
    runtime.close()
    assert threading.active_count() < before
    assert telemetry._sink._fd is None


def test_a_device_tells_what_torch_reserved_of_it():
    device: Any = SimpleNamespace(memory=lambda: SimpleNamespace(total=96, used=43, free=53), link_traffic=lambda: None)
    numbers = _device_numbers(device, lambda: 40)
    assert numbers == {"total": 96, "used": 43, "free": 53, "reserved": 40}
    assert undescribed({"kind": "step", "device": numbers}) == []
