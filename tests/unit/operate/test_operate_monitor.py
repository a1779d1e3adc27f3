"""The monitor: following a growing file, alerts on made-up troubles, the view, and leaving."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.monitor.alerts import alerts
from simpletuner_gh200.operate.monitor.follow import Follower, newest_run
from simpletuner_gh200.operate.monitor.view import spark, view
from simpletuner_gh200.telemetry.reading import Recorded, read_run
from simpletuner_gh200.telemetry.sink import JsonLines

GIB = 1 << 30
START = 1_000_000.0


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
        "metrics": {"gh200/cache/vae/hit_rate": 1.0},
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
        ("hit-rate", {"metrics": {"gh200/cache/vae/hit_rate": 0.5}}),
        ("swapping", {"major_faults": lambda step: 10 + step * 1000}),
        ("slower", {"step_seconds": 2.0}),
        ("loss", {"loss": None}),
    ],
)
def test_each_trouble_is_noticed_and_nothing_else(code: str, changes: dict[str, Any]) -> None:
    assert codes(run_of(**changes)) == [code]


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
    console.print(view(run, alerts(run, START + 61)))
    text = console.export_text()
    assert "[red]run" in text
    assert "waiting for data" in text
    assert "300 GiB" in text


def test_spark_covers_its_range() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5.0, 5.0], 8) == "▄▄"
    assert len(spark(range(100), 10)) == 10


@pytest.mark.slow
def test_ctrl_c_ends_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    """A process stands for the run; the monitor is interrupted as a terminal would do it."""
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
