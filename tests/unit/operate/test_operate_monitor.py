"""The monitor: following a growing file, alerts on made-up troubles, the view, and leaving."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.liveness import liveness
from simpletuner_gh200.operate.monitor.alerts import alerts
from simpletuner_gh200.operate.monitor.cache_counts import shares_in_memory
from simpletuner_gh200.operate.monitor.follow import RunFollower, wait_for
from simpletuner_gh200.operate.monitor.view import spark, view
from simpletuner_gh200.operate.run_folder import newest_run
from simpletuner_gh200.telemetry.reading import Follower, Recorded, read_run
from simpletuner_gh200.telemetry.sink import JsonLines

GIB = 1 << 30
START = 1_000_000.0


def cache_told(hits: int, misses: int, *, held: int) -> dict[str, Any]:
    return {"caches": {"vae": {"hits": hits, "misses": misses, "hit_rate": hits / (hits + misses), "held_bytes": held}}}


def healthy(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "step",
        "step": step,
        "time": START + step,
        "step_seconds": 1.0,
        "data_wait_seconds": 0.01,
        "effective_batch": 16,
        "loss": 0.5,
        "major_faults": 10,
        "host": {"available": 300 * GIB, "total": 480 * GIB},
        "device": {"free": 20 * GIB, "total": 96 * GIB},
        "features": cache_told(step * 16, 0, held=GIB),
    }
    return {**record, **changes}


def run_of(count: int = 60, **changes: Any) -> Recorded:
    """A healthy run whose second half has ``changes``; callables get the step."""
    steps = [healthy(step) for step in range(1, count // 2 + 1)]
    for step in range(count // 2 + 1, count + 1):
        given = {key: value(step) if callable(value) else value for key, value in changes.items()}
        steps.append(healthy(step, **given))
    return Recorded(Path("gh200/telemetry.jsonl"), start={"max_steps": 100, "step": 0}, steps=steps)


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
        ("hit-rate", {"features": lambda step: cache_told(step * 8, step * 8, held=GIB)}),
        ("swapping", {"major_faults": lambda step: 10 + step * 1000}),
        ("slower", {"step_seconds": 2.0}),
        ("loss", {"loss": None}),
    ],
)
def test_each_trouble_is_noticed_and_nothing_else(code: str, changes: dict[str, Any]) -> None:
    assert codes(run_of(**changes)) == [code]


def test_misses_of_a_cache_that_is_being_filled_are_no_trouble() -> None:
    """As in every first run: nothing is in memory before it was read once, and no budget changes that."""
    filled = [
        healthy(step, features=cache_told(max(0, step - 40) * 4, min(step, 40) * 4, held=min(step, 40) * GIB))
        for step in range(1, 61)
    ]
    for seen in (10, 40, 43, 60):
        assert codes(Recorded(Path("x"), steps=filled[:seen])) == []
    full = [healthy(step, features=cache_told(60 + step, 60 + step * 3, held=40 * GIB)) for step in range(61, 81)]
    (alert,) = alerts(Recorded(Path("x"), steps=[*filled, *full]), START + 81)
    assert alert.code == "hit-rate" and "25%" in alert.text and "cache vae" in alert.text


def shown_view(run: Recorded) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(run, [], liveness(run), width=100))
    return console.export_text()


def test_the_view_has_the_share_of_reads_that_memory_answered() -> None:
    steps = [healthy(1, features=cache_told(0, 4, held=1)), healthy(2, features=cache_told(3, 5, held=1))]
    run = Recorded(Path("project/output/gh200/telemetry.jsonl"), steps=steps)
    assert shares_in_memory(run, 9) == [0.0, 0.75]
    shown = shown_view(run)
    assert re.search(r"cache hits +75%", shown)
    assert "project/output" in shown
    assert "cache hits" not in shown_view(Recorded(Path("x"), steps=[healthy(1, features={})]))


@pytest.mark.parametrize("told", [None, 3, {"caches": 4}, {"caches": {"vae": 5}}, {"caches": {"vae": {"hits": "x"}}}])
def test_records_of_caches_that_are_none_are_passed_over(told: object) -> None:
    assert codes(run_of(features=told)) == []


def test_a_growing_batch_is_no_slowdown() -> None:
    assert codes(run_of(step_seconds=4.0, effective_batch=64)) == []


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


def test_following_through_growth_tears_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "gh200" / "telemetry.jsonl"
    sink = JsonLines(path, max_bytes=400)
    sink.write({"kind": "start", "step": 0})
    follower = Follower(tmp_path)
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
    assert path.with_name("telemetry.jsonl.1").exists()
    assert [record["step"] for record in follower.recorded.steps] == list(range(1, 31))
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
    follower = RunFollower(folder)
    drawn: list[object] = []

    def look() -> None:
        follower.poll()
        alive = liveness(follower.recorded)
        found = alerts(follower.recorded, START + steps, others=follower.others)
        drawn[:] = [view(follower.recorded, found, alive, follower.ranks(), width=120)]

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


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    for name, age in (("a", 100), ("b", 0), ("c", 50)):
        JsonLines(tmp_path / "output" / name / "gh200" / "telemetry.jsonl").write({"kind": "start", "step": 0})
        stamp = time.time() - age
        os.utime(tmp_path / "output" / name / "gh200" / "telemetry.jsonl", (stamp, stamp))
    assert newest_run(tmp_path).parent.parent.name == "b"
    with pytest.raises(UsageError, match="output_dir"):
        newest_run(tmp_path / "output" / "a" / "gh200")


def test_the_view_says_numbers_and_alerts_and_treats_names_as_text() -> None:
    run = run_of(data_wait_seconds=0.4)
    run.path = Path("[red]run/gh200/telemetry.jsonl")
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(run, alerts(run, START + 61), liveness(run)))
    text = console.export_text()
    assert "[red]run" in text
    assert "waiting for data" in text
    assert "300 GiB" in text


def test_spark_covers_its_range() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5.0, 5.0], 8) == "▄▄"
    assert len(spark(range(100), 10)) == 10


@pytest.mark.parametrize("slow", [1, 3])
def test_slow_steps_do_not_flatten_the_others(slow: int) -> None:
    usual = [1.0 + 0.01 * (step % 10) for step in range(60)]
    drawn = spark([*usual[:30], *[500.0] * slow, *usual[30:]], 70)
    assert len(set(drawn)) == 8, "the others still go up and down"
    assert drawn[30] == "█"
    assert len(set(spark([9.0, 1.0, 1.1, 1.2, 1.3], 8))) > 3, "a slow first step neither"


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


def test_a_run_is_alive_as_long_as_its_process_is() -> None:
    run = live()
    found = liveness(run)
    assert (found.state, found.words) == ("running", f"running, process {os.getpid()}")
    assert found.elapsed == pytest.approx(50, abs=5) and found.remaining == pytest.approx(150)
    assert liveness(run, now=time.time() + 9000).state == "running", "a long validation is no death"
    dead = subprocess.Popen(["true"])
    dead.wait()
    killed = live(pid=dead.pid)
    assert liveness(killed).state == "unseen", "records are fresh: it may be in another container"
    gone = liveness(killed, now=time.time() + 600)
    assert gone.state == "gone" and f"process {dead.pid} is gone" in gone.words
    assert gone.elapsed == pytest.approx(50, abs=5) and gone.remaining is None


def test_another_process_of_that_number_is_not_the_run() -> None:
    assert liveness(live(time=1000.0), now=time.time() + 600).state == "gone", "this process is younger than the run"


def test_a_run_of_another_machine_can_not_be_seen() -> None:
    found = liveness(live(host="node7"))
    assert found.state == "unseen" and "node7" in found.words and found.remaining is not None


def test_a_dead_run_is_an_alarm_and_not_a_silence() -> None:
    run = live()
    found = [alert.code for alert in alerts(run, time.time() + 9000, gone="its process is gone")]
    assert found == ["gone"]


@pytest.mark.parametrize("width", [80, 160])
def test_the_view_is_as_wide_as_the_screen_and_says_how_far_it_is(width: int) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    run = live(150)
    console.print(view(run, [], liveness(run), width=width))
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "step 150 of 200" in text and "elapsed" in text and "about 50.0 s remaining" in text
    (rate,) = [line for line in lines if "learning rate" in line]
    assert "0.0001" in rate
    assert rate.count("▄") > width - 50


def test_without_unicode_everything_is_ascii(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "gh200" / "telemetry.jsonl")
    for step in range(1, 30):
        sink.write(healthy(step))
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "90"}
    command = [sys.executable, "-m", "simpletuner_gh200.cli.main", "monitor", str(tmp_path), "--once"]
    done = subprocess.run(command, env=plain, capture_output=True, timeout=60, check=True)
    assert done.stdout.isascii() and b"?" not in done.stdout
    assert b"300 GiB" in done.stdout


def write_ranks(folder: Path, count: int) -> None:
    for rank in range(count):
        sink = JsonLines(folder / "gh200" / (f"telemetry.rank{rank}.jsonl" if rank else "telemetry.jsonl"))
        sink.write({"kind": "start", "time": START, "max_steps": 9, "ranks": 3, "rank": rank, "host": f"n{rank}"})
        for step in range(1, 6):
            sink.write(healthy(step, compute_seconds=0.5, data_wait_seconds=0.3 if rank == 2 else 0.01))
        sink.close()


def test_ranks_are_followed_as_they_appear(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1)
    follower = RunFollower(tmp_path)
    assert follower.ranks() is None
    write_ranks(tmp_path / "later", 3)
    for rank in (1, 2):
        name = f"telemetry.rank{rank}.jsonl"
        (tmp_path / "later" / "gh200" / name).rename(tmp_path / "gh200" / name)
    follower.poll()
    ranks = follower.ranks()
    assert ranks is not None and ranks.slowest.rank == 2 and ranks.imbalance == pytest.approx(0.29)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(follower.recorded, [], liveness(follower.recorded), ranks, width=100))
    text = " ".join(console.export_text().split())
    assert "3 ranks on 3 nodes: slowest is rank 2 on n2" in text and "data wait 300 ms" in text
    follower.close()


@pytest.mark.parametrize("words", [["nowhere"], ["empty"], ["nowhere", "--once"], ["empty", "--json"]])
def test_a_folder_without_a_run_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    from simpletuner_gh200.cli.main import main

    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gh200", "monitor", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert words[0] in shown and "remedy: name the output_dir of a run" in shown


def test_a_job_that_has_recorded_nothing_yet_is_waited_for(tmp_path: Path) -> None:
    """Another process holds the folder, as a run does while it loads its model."""
    output = tmp_path / "output"
    output.mkdir()
    code = "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX); "
    job = subprocess.Popen(
        [sys.executable, "-c", code + "print('held', flush=True); time.sleep(60)", str(output)], stdout=-1
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == b"held\n"
        said: list[str] = []

        def begin(words: str) -> None:
            said.append(words)
            write_ranks(output, 1)

        assert wait_for(output, 0.01, begin) == output / "gh200" / "telemetry.jsonl"
        assert f"process {job.pid}" in said[0]
    finally:
        job.kill()
        job.wait()


@pytest.mark.slow
def test_ctrl_c_ends_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    """A process stands for the run; the monitor is interrupted as a terminal would do it."""
    (tmp_path / "config.json").write_text("{}")  # a project, so that a run may begin here
    training = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    command = [sys.executable, "-m", "simpletuner_gh200.cli.main", "monitor", str(tmp_path), "--every", "0.1"]
    # Tests that were started in the background ignore the signal, and so would the monitor.
    watching = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    try:
        assert watching.stdout is not None
        watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        rest, _ = watching.communicate(timeout=30)
        assert watching.returncode == 0, rest
        assert training.poll() is None
    finally:
        watching.kill()
        training.kill()
        training.wait()


def test_json_is_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from simpletuner_gh200.cli.main import main

    sink = JsonLines(tmp_path / "gh200" / "telemetry.jsonl")
    for step in range(1, 30):
        sink.write(healthy(step, data_wait_seconds=0.9))
    monkeypatch.setattr(sys, "argv", ["gh200", "monitor", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["latest"]["step"] == 29
    assert {"data-wait", "silence"} == {alert["code"] for alert in found["alerts"]}
    assert read_run(tmp_path).steps
