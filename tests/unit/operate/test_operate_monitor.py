"""The monitor: what is on the screen, waiting for a run, and leaving it."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.monitor import screen_of, spark, wait_for
from simpletuner_gh200.operate.run_folder import newest_run
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.sink import JsonLines
from simpletuner_gh200.telemetry.view import RunView
from tests.unit.telemetry.run_samples import healthy, run_of, write_ranks


def shown(view: RunView, *, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen_of(view, console))
    return console.export_text()


def test_the_screen_says_numbers_and_alerts_and_treats_names_as_text() -> None:
    run = run_of(data_wait_seconds=0.4)
    run.path = Path("[red]run/gh200/telemetry.jsonl")
    text = shown(RunView(run))
    assert "[red]run" in text
    assert "waiting for data" in text
    assert "300 GiB" in text
    assert re.search(r"cache hits +100 %", text)


def test_ranks_are_on_the_screen(tmp_path: Path) -> None:
    write_ranks(tmp_path, 3)
    text = " ".join(shown(RunView.read(tmp_path / "gh200" / "telemetry.jsonl")).split())
    assert "3 ranks on 3 nodes: slowest is rank 2 on n2" in text and "data wait 300 ms" in text


@pytest.mark.parametrize("before", ["nothing", "an end", "a kill"])
def test_a_caching_pass_is_on_the_screen_until_the_run_begins(tmp_path: Path, before: str) -> None:
    """In a folder of an earlier run as well, whose steps it goes on from."""
    sink = JsonLines(tmp_path / "telemetry.jsonl")
    earlier = [
        {"kind": "start", "pid": 2**30, "host": "x", "time": 1.0},
        healthy(5),
        {"kind": "end", "status": "failed"},
    ]
    for record in earlier[: {"nothing": 0, "a kill": 2, "an end": 3}[before]]:
        sink.write(record)
    told = {"kind": "caching", "pid": os.getpid(), "host": platform.node(), "time": time.time(), "words": "a: 7 of 9"}
    sink.write(told)
    view = RunView.follow(sink.path)
    assert "caching a: 7 of 9" in shown(view) and f"running, process {os.getpid()}" in shown(view)
    assert "nothing to be alarmed about" in shown(view)
    assert dict(RunView(Recorded.tail(sink.path)).progress())["caching"] == "a: 7 of 9"
    sink.write({**told, "kind": "start", "step": 5})
    view.refresh()
    assert "caching" not in dict(view.progress())
    assert view.run.step == 5


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    for name, age in (("a", 100), ("b", 0), ("c", 50)):
        JsonLines(tmp_path / "output" / name / "gh200" / "telemetry.jsonl").write({"kind": "start", "step": 0})
        stamp = time.time() - age
        os.utime(tmp_path / "output" / name / "gh200" / "telemetry.jsonl", (stamp, stamp))
    assert newest_run(tmp_path).parent.parent.name == "b"
    with pytest.raises(UsageError, match="output_dir"):
        newest_run(tmp_path / "output" / "a" / "gh200")


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


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_is_filled_and_says_how_far_it_is(width: int) -> None:
    now = time.time()
    steps = [healthy(number, time=now - 150 + number, learning_rate=1e-4) for number in range(1, 151)]
    start = {"kind": "start", "time": now - 150, "max_steps": 200}
    lines = shown(
        RunView(Recorded(Path("run/gh200/telemetry.jsonl"), start=start, steps=steps)), width=width
    ).splitlines()
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "step 150 of 200" in text and "elapsed" in text and "about 50.0 s remaining" in text
    (rate,) = [line for line in lines if "learning rate" in line]
    assert "0.0001" in rate
    assert rate.count("▄") > width - 60


def test_without_unicode_everything_is_ascii(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "gh200" / "telemetry.jsonl")
    for step in range(1, 30):
        sink.write(healthy(step))
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "90"}
    command = [sys.executable, "-m", "simpletuner_gh200.cli.main", "monitor", str(tmp_path), "--once"]
    done = subprocess.run(command, env=plain, capture_output=True, timeout=60, check=True)
    assert done.stdout.isascii() and b"?" not in done.stdout
    assert b"300 GiB" in done.stdout


@pytest.mark.parametrize("words", [["nowhere"], ["empty"], ["nowhere", "--once"], ["empty", "--json"]])
def test_a_folder_without_a_run_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gh200, words: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _out, shown = gh200("monitor", *words)
    assert code == 2 and words[0] in shown and "remedy: name the output_dir of a run" in shown


@pytest.mark.parametrize("named", [True, False])
def test_a_job_that_has_recorded_nothing_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Another process holds the folder, as a run does while it loads its model; an older run is not what is meant."""
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

        write_ranks(tmp_path / "older", 1)
        if named:
            assert wait_for(output, 0.01, begin) == output / "gh200" / "telemetry.jsonl"
        else:
            monkeypatch.chdir(tmp_path)
            assert wait_for(None, 0.01, begin) == Path("output/gh200/telemetry.jsonl")
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


def test_json_is_one_object(tmp_path: Path, gh200) -> None:
    sink = JsonLines(tmp_path / "gh200" / "telemetry.jsonl")
    for step in range(1, 30):
        sink.write(healthy(step, data_wait_seconds=0.9))
    code, out, _err = gh200("monitor", tmp_path, "--json")
    assert code == 0
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["latest"]["step"] == 29
    assert {"data-wait", "silence"} == {alert["code"] for alert in found["alerts"]}
