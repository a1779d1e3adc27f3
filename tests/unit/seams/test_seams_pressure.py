"""A pool that CPU and GPU share runs full: the run ends with an error, in good order where a batch comes soon."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.seams.features import pressure
from simpletuner_gh200.seams.features.pressure import PressureFeature
from simpletuner_gh200.seams.runtime import RunOutcome


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A run on a machine of 128 GiB with so much of it available; the watch has looked, more than once."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(PressureFeature, "root", tmp_path)
    monkeypatch.setattr(pressure, "EVERY_SECONDS", 0.005)
    made = []

    def start(gib: float, *, one_pool: bool = True) -> PressureFeature:
        kib, looked, asked = int(gib * 1024 * 1024), threading.Event(), []
        lines = f"MemTotal: {128 * 1024 * 1024} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(lines)
        monkeypatch.setattr(pressure.detect, "single_pool", lambda: one_pool)

        def memory(root, ask=pressure.host_memory):
            asked.append(root)
            if len(asked) > 1:
                looked.set()
            return ask(root)

        monkeypatch.setattr(pressure, "host_memory", memory)
        feature = PressureFeature()
        feature.runtime = SimpleNamespace(outcome=RunOutcome())
        feature.before_train(None)
        made.append(feature)
        feature.looked = looked
        return feature

    yield start
    for feature in made:
        feature.after_train(None)


def test_a_run_ends_at_its_next_batch(started, monkeypatch):
    monkeypatch.setattr(pressure, "PATIENCE_SECONDS", 0.0)
    interrupted = threading.Event()
    monkeypatch.setattr(pressure._thread, "interrupt_main", interrupted.set)
    feature = started(1)
    assert interrupted.wait(60), "where no batch comes"
    with pytest.raises(MemoryRoomError, match="only 1 GiB is left of the memory that CPU and GPU share"):
        feature.batch_prepared(None, {})
    assert "before the machine freezes" in feature.runtime.outcome.reason
    assert (feature.runtime.outcome.status, feature.runtime.outcome.exit_code) == ("failed", 1)


def test_a_run_with_enough_goes_on(started):
    feature = started(3)
    assert feature.looked.wait(60)
    assert feature.batch_prepared(None, {}) == {}
    assert feature.runtime.outcome.status != "failed"


def test_nothing_is_watched_where_the_gpu_has_memory_of_its_own(started):
    assert started(0.1, one_pool=False)._thread is None
