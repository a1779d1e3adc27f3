"""Clock, sink, sampler and reader of telemetry."""

from __future__ import annotations

import json
import logging
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.telemetry.measure import Sampler, StepClock
from simpletuner_gh200.telemetry.reading import read_run
from simpletuner_gh200.telemetry.sink import JsonLines


class FakeTime:
    def __init__(self) -> None:
        self.value = 100.0

    def __call__(self) -> float:
        return self.value

    def pass_(self, seconds: float) -> None:
        self.value += seconds


def test_waiting_and_computing_are_told_apart() -> None:
    now = FakeTime()
    clock = StepClock(now)
    for wait, compute in ((2.0, 5.0), (1.0, 4.0)):
        clock.batch_requested()
        now.pass_(wait)
        clock.batch_ready(samples=3)
        now.pass_(compute)
        clock.batch_done()
    now.pass_(0.5)
    times = clock.step_done()
    assert (times.seconds, times.data_wait, times.compute, times.other) == (12.5, 3.0, 9.0, 0.5)
    assert (times.micro_batches, times.samples) == (2, 6)


def test_an_evaluation_batch_does_not_count() -> None:
    now = FakeTime()
    clock = StepClock(now)
    clock.batch_requested()
    clock.batch_ready(2)
    clock.batch_done()
    now.pass_(9.0)
    clock.batch_ready(2)
    clock.batch_done()
    times = clock.step_done()
    assert (times.samples, times.micro_batches, times.other) == (2, 1, 9.0)


def test_the_wait_for_a_batch_that_never_came_counts() -> None:
    now = FakeTime()
    clock = StepClock(now)
    clock.batch_requested()
    now.pass_(2.0)
    clock.batch_requested()
    now.pass_(1.0)
    clock.batch_ready(1)
    assert clock.step_done().data_wait == 3.0


@given(st.lists(st.tuples(st.sampled_from(["ask", "ready", "done", "step"]), st.floats(0, 10)), max_size=40))
def test_parts_never_exceed_the_whole(moments: list[tuple[str, float]]) -> None:
    now = FakeTime()
    clock = StepClock(now)
    for name, seconds in moments:
        now.pass_(seconds)
        if name == "ask":
            clock.batch_requested()
        elif name == "ready":
            clock.batch_ready(1)
        elif name == "done":
            clock.batch_done()
        else:
            clock.step_done()
    times = clock.step_done()
    assert times.other >= 0
    assert times.seconds >= 0


# -- sink ----------------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond ``size`` is refused, as on a full disk, and the last write may be cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": 0.5}


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "gh200" / "telemetry.jsonl"
    path.parent.mkdir()
    path.write_text("")
    path.chmod(0o644)
    sink = JsonLines(path)
    sink.write(step(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "telemetry.jsonl").symlink_to(victim)
    sink = JsonLines(tmp_path / "telemetry.jsonl")
    sink.write(step(1))
    assert sink.dropped == 1
    assert victim.read_text() == "precious"


def test_no_number_is_not_a_number_in_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "t.jsonl")
    sink.write({"kind": "step", "step": 1, "loss": float("nan"), "more": {"x": [float("inf")]}})
    assert json.loads((tmp_path / "t.jsonl").read_text()) == {
        "kind": "step",
        "step": 1,
        "loss": None,
        "more": {"x": [None]},
    }


def test_a_full_disk_costs_one_warning_and_later_records_are_kept(tmp_path: Path, caplog) -> None:
    sink = JsonLines(tmp_path / "telemetry.jsonl")
    sink.write(step(1))
    size = (tmp_path / "telemetry.jsonl").stat().st_size
    with caplog.at_level(logging.WARNING), largest_file(size + 7):
        for number in range(2, 6):
            sink.write(step(number))
    sink.write(step(6))
    assert len([entry for entry in caplog.records if "telemetry" in entry.message]) == 1
    assert sink.dropped == 4
    recorded = read_run(tmp_path)
    assert [record["step"] for record in recorded.steps] == [1, 6]
    assert recorded.unreadable == 1


def test_a_torn_last_line_of_a_killed_run_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    (tmp_path / "telemetry.jsonl").write_text('{"kind":"step","step":1}\n{"kind":"st')
    JsonLines(tmp_path / "telemetry.jsonl").write(step(2))
    assert [record["step"] for record in read_run(tmp_path).steps] == [1, 2]


# -- sampler -------------------------------------------------------------------------------------------


def test_a_source_that_breaks_is_asked_no_more(caplog) -> None:
    asked = []

    def broken() -> dict[str, int]:
        asked.append(1)
        raise RuntimeError("NVML went away")

    sampler = Sampler({"bad": broken, "good": lambda: {"x": 1}}, every=60)
    sampler.start()
    sampler.ask()
    sampler.stop()
    assert asked == [1]
    assert sampler.latest == {"good": {"x": 1}}
    assert "NVML went away" in caplog.text


# -- reader --------------------------------------------------------------------------------------------


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "telemetry.jsonl")
    sink.write({"kind": "start", "step": 0})
    for number in range(1, 8):
        sink.write({**step(number), "loss": 1.0})
    sink.write({"kind": "start", "step": 4})
    for number in range(5, 9):
        sink.write({**step(number), "loss": 2.0})
    recorded = read_run(tmp_path)
    assert recorded.series("loss") == [(n, 1.0) for n in range(1, 5)] + [(n, 2.0) for n in range(5, 9)]


def test_no_telemetry_is_a_usage_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="output_dir"):
        read_run(tmp_path)


def test_numbers_are_found_by_their_path(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "telemetry.jsonl")
    sink.write({**step(1), "host": {"available": 5}, "metrics": {"gh200/caches/hit_rate": 0.5}, "note": "text"})
    recorded = read_run(tmp_path)
    assert recorded.series("host/available") == [(1, 5.0)]
    assert recorded.series("note") == []
    assert recorded.series("nothing/at/all") == []
