"""A pool that CPU and GPU share runs full: the run ends with an error, in good order where a batch comes soon."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from simpletuner_gh200.errors import MemoryRoomError
from simpletuner_gh200.memory.pressure import Relief
from simpletuner_gh200.seams.features import pressure
from simpletuner_gh200.seams.features.pressure import PressureFeature
from simpletuner_gh200.seams.runtime import RunOutcome


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 128 GiB whose available memory a test sets."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(PressureFeature, "root", tmp_path)
    monkeypatch.setattr(pressure, "EVERY_SECONDS", 0.005)

    def available(gib: float, *, one_pool: bool) -> None:
        kib = int(gib * 1024 * 1024)
        lines = f"MemTotal: {128 * 1024 * 1024} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(lines)
        monkeypatch.setattr(pressure.detect, "single_pool", lambda: one_pool)

    return available


@pytest.fixture
def started():
    made = []

    def start(*reliefs):
        feature = PressureFeature()
        holder = SimpleNamespace(memory_relief=lambda: list(reliefs))
        feature.runtime = SimpleNamespace(features_on=[holder], outcome=RunOutcome())
        feature.before_train(None)
        made.append(feature)
        return feature

    yield start
    for feature in made:
        feature.after_train(None)


def until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_ends_at_its_next_batch(machine, started):
    machine(1, one_pool=True)
    feature = started()
    until(lambda: feature.runtime.outcome.status == "failed")
    with pytest.raises(MemoryRoomError, match="only 1 GiB is left of the memory that CPU and GPU share"):
        feature.batch_prepared(None, {})
    assert "before the machine freezes" in feature.runtime.outcome.reason
    assert feature.runtime.outcome.exit_code == 1


def test_a_run_without_batches_is_interrupted(machine, started, monkeypatch):
    interrupted = []
    monkeypatch.setattr(pressure, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(pressure._thread, "interrupt_main", lambda: interrupted.append(True))
    machine(1, one_pool=True)
    started()
    until(lambda: interrupted)


def test_what_is_held_for_speed_goes_first(machine, started):
    given = []
    machine(1, one_pool=True)
    feature = started(Relief("cache", lambda: 1 << 30, lambda: given.append("cache")))
    until(lambda: given)
    assert feature.batch_prepared(None, {}) == {}, "its effect is waited for"


@pytest.mark.parametrize(("gib", "one_pool"), [(3, True), (0.1, False)], ids=["enough", "a GPU with its own memory"])
def test_other_runs_go_on(machine, started, gib, one_pool):
    machine(gib, one_pool=one_pool)
    feature = started()
    time.sleep(0.05)
    assert feature.batch_prepared(None, {}) == {}
    assert feature.runtime.outcome.status != "failed"
