"""What the points on the trainer pass on: to the trackers, into events, and back off again."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.ramp.schedule import GH200GradientRamp
from simpletuner_gh200.seams.feature import Feature
from simpletuner_gh200.seams.features.ramp.windows import Windows
from simpletuner_gh200.seams.loop import LoopWatch
from simpletuner_gh200.seams.patch import Patches
from simpletuner_gh200.seams.points.trainer import extend_log
from simpletuner_gh200.seams.rank import heard_by
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON


class Counting(Feature):
    name = "telemetry"

    def request(self, settings, environment):
        return "auto"

    def metrics(self, values):
        values["everywhere"] = True

    def step_logged(self, values, step):
        values["logged"] = (step, values["everywhere"])

    def event_sent(self, values):
        values["sent"] = values["everywhere"]


class Accelerator:
    sync_gradients = True
    gradient_accumulation_steps = 1
    step = 0

    def __init__(self):
        self.seen = []
        self.gradient_state = SimpleNamespace(plugin_kwargs={})

    def log(self, values, step=None, log_kwargs=None):
        self.seen.append(values)

    @contextmanager
    def accumulate(self, *models):
        yield


@pytest.fixture
def runtime():
    made, feature = Runtime(Launch()), Counting()
    made.features, feature.runtime = (feature,), made
    for seam in made.seams.values():
        seam.status = ON
    made.configure(resolve({}, {}))
    return made


def test_metrics_reach_trackers_before_the_step_is_recorded(runtime):
    accelerator = Accelerator()
    extend_log(accelerator, runtime)
    accelerator.log({"train_loss": 1}, step=4)
    accelerator.log(values={"train_loss": 1}, step=5)
    assert [values["logged"] for values in accelerator.seen] == [(4, True), (5, True)]
    runtime.close()
    assert "log" not in vars(accelerator)


def test_the_accelerator_of_a_run_before_is_let_go(runtime):
    first = Accelerator()
    extend_log(first, runtime)
    gone = weakref.ref(first)
    extend_log(Accelerator(), runtime)
    del first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"progress": {"metrics": {}}}, True),
        ({"progress": {"metrics": None}}, False),
        ({"progress": None}, False),
        ({"type": "training.status"}, False),
        ("not an event", False),
    ],
)
def test_an_event_with_metrics_gets_ours_and_any_other_passes(runtime, event, told):
    class Trainer:
        def _emit_event(self, event, message_level="info"):
            return event

    module = ModuleType("stand_in")
    module.Trainer = Trainer
    for patch in runtime.seams["trainer.emit_event"].seam.patches(module, runtime):
        patch.install()
    assert Trainer()._emit_event(event) is event
    if told:
        assert event["progress"]["metrics"] == {"everywhere": True, "sent": True}


def test_a_failure_that_older_releases_only_print_is_recorded(runtime, capsys):
    heard_by(runtime)("failed:", OSError(28, "No space left on device", "/nowhere/cache.pt"))
    assert capsys.readouterr().out.startswith("failed: [Errno 28] No space")
    assert runtime.outcome.status == "failed"
    assert runtime.outcome.reason.splitlines()[-1].startswith("  cause: ")


def test_ramp_and_loop_leave_the_accelerator_as_it_was(runtime):
    accelerator = Accelerator()
    trainer = SimpleNamespace(accelerator=accelerator, _exit_on_signal=lambda: None)
    ramp = GH200GradientRamp(2, 4, 4, train_batch_size=2)
    windows = Windows(accelerator, SimpleNamespace(), ramp.target_accumulation, lambda: ramp.window(0))
    loop = LoopWatch(trainer, runtime)
    patches = Patches()
    patches.install(windows.patch())
    loop.install()
    with accelerator.accumulate():
        assert windows.current is not None
    loop.remove()
    patches.remove()
    windows.let_go()
    assert "accumulate" not in vars(accelerator)
