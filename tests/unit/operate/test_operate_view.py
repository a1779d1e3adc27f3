"""A run as people see it: alerts on made-up troubles, whether it is alive, its numbers, and what a look costs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from simpletuner_gh200.operate.monitor import screen_of
from simpletuner_gh200.telemetry.alerts import alerts
from simpletuner_gh200.telemetry.numbers import hit_rates
from simpletuner_gh200.telemetry.reading import TAIL, Recorded, read_run
from simpletuner_gh200.telemetry.sink import JsonLines
from simpletuner_gh200.telemetry.view import RunStatus, RunView
from tests.unit.telemetry.run_samples import GIB, START, caches, healthy, run_of, write_ranks


def codes(run: Recorded, *, after: float = 1.0) -> list[str]:
    return [alert.code for alert in alerts(run, START + len(run.steps) + after)]


def test_a_healthy_run_is_quiet() -> None:
    assert codes(run_of()) == []
    assert codes(Recorded(Path("x"))) == []


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("data-wait", {"data_wait_seconds": 0.4}),
        ("host-memory", {"host": {"available": 1 * GIB, "total": 480 * GIB}}),
        ("device-memory", {"device": {"free": 1 * GIB, "total": 96 * GIB}}),
        ("hit-rate", {"features": lambda step: caches(step * 8, step * 8, held=GIB)}),
        ("loss", {"loss": None}),
    ],
)
def test_each_trouble_is_noticed_and_nothing_else(code: str, changes: dict[str, Any]) -> None:
    assert codes(run_of(**changes)) == [code]


def test_misses_of_a_cache_that_is_being_filled_are_no_trouble() -> None:
    """As in every first run: nothing is in memory before it was read once, and no budget changes that."""
    filled = [
        healthy(step, features=caches(max(0, step - 40) * 4, min(step, 40) * 4, held=min(step, 40) * GIB))
        for step in range(1, 61)
    ]
    for seen in (10, 40, 43, 60):
        assert codes(Recorded(Path("x"), steps=filled[:seen])) == []
    full = [healthy(step, features=caches(60 + step, 60 + step * 3, held=40 * GIB)) for step in range(61, 81)]
    (alert,) = alerts(Recorded(Path("x"), steps=[*filled, *full]), START + 81)
    assert alert.code == "hit-rate" and "25%" in alert.text and "cache vae" in alert.text


def test_the_share_of_reads_that_memory_answered_by_cache_and_of_all() -> None:
    features = [caches(0, 4, held=1), caches(3, 5, held=1), caches(3, 5, held=1), caches(4, 5, held=1)]
    features[3]["caches"]["text"] = {"hits": 0, "misses": 3, "held_bytes": 1}
    run = Recorded(Path("x"), steps=[healthy(step, features=told) for step, told in enumerate(features, 1)])
    assert hit_rates(run) == [(1, 0.0), (2, 0.75), (4, 0.25)], "none where nothing was read"
    assert hit_rates(run, "vae") == [(1, 0.0), (2, 0.75), (4, 1.0)]
    assert dict(RunView(run).latest())["cache hits"] == "25 %"
    assert "cache hits" not in dict(RunView(Recorded(Path("x"), steps=[healthy(1, features={})])).latest())


@pytest.mark.parametrize("told", [None, 3, {"caches": 4}, {"caches": {"vae": 5}}, {"caches": {"vae": {"hits": "x"}}}])
def test_records_of_caches_that_are_none_are_passed_over(told: object) -> None:
    assert codes(run_of(features=told)) == []


def test_silence_is_noticed_unless_the_run_ended() -> None:
    run = run_of()
    assert codes(run, after=600) == ["silence"]
    run.end = {"status": "completed"}
    assert codes(run, after=600) == []


def test_alarms_come_first() -> None:
    run = run_of(data_wait_seconds=0.4, host={"available": GIB, "total": 480 * GIB})
    assert codes(run) == ["host-memory", "data-wait"]


def other_rank(rank: int, node: str, **changes: Any) -> Recorded:
    run = run_of(**changes)
    run.path, run.start = Path(f"gh200/telemetry.rank{rank}.jsonl"), {**run.start, "host": node}
    return run


def test_every_node_and_every_gpu_is_watched() -> None:
    """The main rank is well; what happens beside it and on the other node is said once, with its place."""
    run = run_of()
    run.start["host"] = "n1"
    poor = {"host": {"available": GIB, "total": 480 * GIB}}
    full = {"device": {"free": GIB, "total": 96 * GIB}}
    others = [other_rank(1, "n1", **poor), other_rank(2, "n2", **poor), other_rank(3, "n2", **poor, **full)]
    found = alerts(run, START + 61, others=others)
    assert [(alert.level, alert.code, alert.text.split(":")[0]) for alert in found] == [
        ("alarm", "host-memory", "on n2"),
        ("warn", "device-memory", "rank 3 on n2"),
    ]


def test_following_through_growth_and_tears(tmp_path: Path) -> None:
    path = tmp_path / "gh200" / "telemetry.jsonl"
    sink = JsonLines(path)
    sink.write({"kind": "start", "step": 0})
    follower = Recorded.follow(path)
    for step in range(1, 31):
        sink.write({"kind": "step", "step": step})
        if step == 7:
            with path.open("ab") as torn:
                torn.write(b'{"kind":"st')
            follower.poll()
            with path.open("ab") as rest:
                rest.write(b"\n")
        follower.poll()
    sink.close()
    assert [record["step"] for record in follower.steps] == list(range(1, 31))
    follower.close()


def lines_run_by(action: Callable[[], object]) -> int:
    """How many lines of Python it takes: exact, where seconds are not."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def refreshing(folder: Path, steps: int) -> tuple[int, str]:
    """What one look costs after one more step of a run of two ranks, and what it shows."""
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    folder.mkdir()
    sinks = [JsonLines(folder / name) for name in ("telemetry.jsonl", "telemetry.rank1.jsonl")]
    for rank, sink in enumerate(sinks):
        sink.write({"kind": "start", "time": START, "max_steps": 9999, "ranks": 2, "rank": rank, "host": "n"})
        for step in range(1, steps + 1):
            sink.write(healthy(step, compute_seconds=0.5, effective_batch=4 if step < 50 else 16))
    view = RunView.follow(folder / "telemetry.jsonl")
    drawn: list[Any] = []

    def look() -> None:
        view.refresh()
        drawn[:] = [screen_of(view, console)]

    look()
    for sink in sinks:
        sink.write(healthy(steps + 1, compute_seconds=0.5, loss=0.125))
    cost = lines_run_by(look)
    console.print(drawn[0])
    return cost, console.export_text()


def test_a_look_costs_what_is_new_however_long_the_run_is(tmp_path: Path) -> None:
    cost, shown = refreshing(tmp_path / "short", 500)
    assert "step 501" in shown and "0.125" in shown and "2 ranks on 1 node" in shown
    longer, shown = refreshing(tmp_path / "long", 2000)
    assert "step 2001" in shown and "0.125" in shown
    assert longer <= cost * 1.02, "a few lines more where numbers have more digits"


def test_a_glance_reads_the_start_and_the_last_steps_only(tmp_path: Path) -> None:
    """What the Web UI's panel shows of a run with a long file, resumed somewhere in it."""
    sink = JsonLines(tmp_path / "gh200" / "telemetry.jsonl")
    for begun in (0, 300):
        sink.write({"kind": "start", "step": begun, "pid": begun + 1, "training": {"note": "x" * TAIL}})
        for step in range(begun + 1, begun + 301):
            sink.write(healthy(step))
    view = RunView.glance(tmp_path)
    assert view is not None and view.run.start["pid"] == 301 and view.run.unreadable == 0
    assert view.run.step == 600 and 20 < len(view.run.steps) < 300
    whole = RunView(read_run(tmp_path))
    assert view.latest() == whole.latest() and view.alerts() == whole.alerts()
    assert RunView.glance(tmp_path / "nowhere") is None


def test_every_number_of_a_run_is_named_once_for_all_who_show_it(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1)
    view = RunView.read(tmp_path / "gh200" / "telemetry.jsonl")
    latest, whole = dict(view.latest()), dict(view.whole())
    assert latest["loss"] == whole["loss"] == "0.5"
    assert (latest["data wait"], whole["median data wait"]) == ("10 ms", "10 ms")
    assert latest["host memory available"] == whole["least host memory available"] == "300 GiB"
    assert len(latest) == len(whole)


def live(step: int = 50, **start: Any) -> Recorded:
    """A run of this process, on this machine, whose steps of a second were recorded just now."""
    now = time.time()
    steps = [healthy(number, time=now - step + number, learning_rate=1e-4) for number in range(1, step + 1)]
    begun = {
        "kind": "start",
        "pid": os.getpid(),
        "host": platform.node(),
        "time": now - step,
        "max_steps": 200,
        **start,
    }
    return Recorded(Path("run/gh200/telemetry.jsonl"), start=begun, steps=steps)


def seen(run: Recorded, **given: Any) -> RunStatus:
    return RunView(run).status(**given)


def test_a_run_is_alive_as_long_as_its_process_is() -> None:
    run = live()
    found = seen(run)
    assert (found.state, found.words) == ("running", f"running, process {os.getpid()}")
    assert found.elapsed == pytest.approx(50, abs=5) and found.remaining == pytest.approx(150)
    assert seen(run, now=time.time() + 9000).state == "running", "a long validation is no death"
    dead = subprocess.Popen(["true"])
    dead.wait()
    killed = live(pid=dead.pid)
    assert seen(killed).state == "unseen", "records are fresh: it may be in another container"
    gone = seen(killed, now=time.time() + 600)
    assert gone.state == "gone" and f"process {dead.pid} ended without recording it" in gone.words
    assert gone.elapsed == pytest.approx(50, abs=5) and gone.remaining is None


def test_the_rest_of_a_ramp_is_counted_in_samples() -> None:
    """50 steps of 16 samples took 50 s; the rest has larger batches, and so longer steps."""
    run = live()
    run.steps[-1]["features"]["ramp"] = {"samples_left": 16 * 1200}
    assert seen(run).remaining == pytest.approx(1200)


def test_another_process_of_that_number_is_not_the_run() -> None:
    assert seen(live(time=1000.0), now=time.time() + 600).state == "gone", "this process is younger than the run"


def test_a_run_of_another_machine_can_not_be_seen() -> None:
    found = seen(live(host="node7"))
    assert found.state == "unseen" and "node7" in found.words and found.remaining is not None


def test_a_dead_run_is_an_alarm_and_not_a_silence() -> None:
    run = live()
    found = [alert.code for alert in alerts(run, time.time() + 9000, gone="its process is gone")]
    assert found == ["gone"]


def test_ranks_are_followed_as_they_appear(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1)
    view = RunView.follow(tmp_path / "gh200" / "telemetry.jsonl")
    assert view.ranks() is None
    write_ranks(tmp_path / "later", 3)
    for rank in (1, 2):
        name = f"telemetry.rank{rank}.jsonl"
        (tmp_path / "later" / "gh200" / name).rename(tmp_path / "gh200" / name)
    view.refresh()
    ranks = view.ranks()
    assert ranks is not None and ranks.slowest.rank == 2 and ranks.imbalance == pytest.approx(0.29)
    assert f"{ranks.size}: {ranks.words}".startswith("3 ranks on 3 nodes: slowest is rank 2 on n2")
