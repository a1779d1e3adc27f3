"""Comparing runs: a run slowed by half is caught, equal runs pass, noise is no regression; and capturing one."""

from __future__ import annotations

import json
import os
import random
import stat
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import launching
from simpletuner_gh200.operate.baseline import capture, compare, estimate, parse_tolerance, regressed
from simpletuner_gh200.operate.ending import Outcome
from simpletuner_gh200.telemetry.reading import Recorded
from simpletuner_gh200.telemetry.sink import JsonLines

GIB = 1 << 30


def run_of(
    seed: int, *, steps: int = 200, slower: float = 1.0, noise: float = 0.05, wait: float = 0.01, hbm: float = 70.0
) -> Recorded:
    """Steps of about a second with noise, now and then a checkpoint, and a slow warm-up."""
    dice = random.Random(seed)
    records = []
    for step in range(1, steps + 1):
        seconds = slower * (1 + abs(dice.gauss(0, noise))) * (3.0 if step < 4 else 1.0) + (
            2.0 if step % 50 == 0 else 0.0
        )
        records.append(
            {
                "kind": "step",
                "step": step,
                "step_seconds": seconds,
                "data_wait_seconds": wait * seconds * dice.uniform(0.5, 1.5),
                "samples_per_second": 4 / seconds,
                "host": {"resident": 90 * GIB + dice.randrange(GIB)},
                "device": {"used": hbm * GIB},
            }
        )
    return Recorded(Path("telemetry.jsonl"), start={"max_steps": steps}, steps=records)


def verdicts(before: Recorded, after: Recorded, tolerance: float = 0.05) -> dict[str, str]:
    return {row.metric.split(" (")[0]: row.judgement for row in compare(before, after, tolerance)}


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.01, 0.3))
def test_equal_runs_pass_however_noisy(seed: int, noise: float) -> None:
    assert not regressed(compare(run_of(seed, noise=noise), run_of(seed + 1, noise=noise), 0.05))


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.0, 0.3))
def test_a_run_slowed_by_half_is_caught(seed: int, noise: float) -> None:
    found = verdicts(run_of(seed, noise=noise), run_of(seed + 1, noise=noise, slower=1.5))
    assert found["throughput"] == "worse"


def test_a_faster_run_is_better_and_no_regression() -> None:
    found = compare(run_of(1, slower=2.0), run_of(2), 0.05)
    assert found[0].judgement == "better"
    assert not regressed(found)


@pytest.mark.parametrize(
    ("metric", "changes"),
    [("data wait", {"wait": 0.3}), ("HBM in use", {"hbm": 90.0}), ("throughput", {"slower": 1.2})],
)
def test_each_metric_by_itself(metric: str, changes: dict[str, float]) -> None:
    found = verdicts(run_of(1), run_of(2, **changes))
    assert found[metric] == "worse"
    assert [name for name, judgement in found.items() if judgement == "worse"] == [metric]


def test_a_change_within_the_tolerance_is_no_news() -> None:
    assert verdicts(run_of(1, noise=0.01), run_of(2, noise=0.01, slower=1.04))["throughput"] == "same"
    assert verdicts(run_of(1, noise=0.01), run_of(2, noise=0.01, slower=1.04), 0.01)["throughput"] == "worse"


def test_a_wait_of_next_to_nothing_may_double() -> None:
    assert verdicts(run_of(1, wait=0.002), run_of(2, wait=0.004))["data wait"] == "same"


def test_too_few_steps_say_nothing() -> None:
    found = compare(run_of(1, steps=3), run_of(2), 0.05)
    assert {row.judgement for row in found} == {"unknown"}
    assert "first" in found[0].reason
    assert estimate([1.0, 1.0]) is None


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("0", 0.0)])
def test_tolerances(text: str, value: float) -> None:
    assert parse_tolerance(text) == value


@pytest.mark.parametrize("text", ["five", "-5%", "150%", "", "5%%"])
def test_bad_tolerances_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="tolerance"):
        parse_tolerance(text)


# -- capturing, with a stand-in for the training process ---------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_family": "sdxl", "output_dir": str(tmp_path / "usual"), "hub_token": "x"}))
    return path


def trainer(folder: Path, exit_code: int = 0):
    """Leaves telemetry as a run would, and remembers what it was to run."""
    seen: list[launching.LaunchCommand] = []

    def run(planned: launching.LaunchCommand) -> Outcome:
        seen.append(planned)
        sink = JsonLines(folder / "run" / "gh200" / "telemetry.jsonl")
        sink.write({"kind": "start", "step": 0, "max_steps": 20, "versions": {"torch": "2.14"}})
        for record in run_of(1, steps=20).steps:
            sink.write(record)
        return Outcome(exit_code)

    return run, seen


def test_a_baseline_holds_what_it_promises(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'timestamp, name'\nexec sleep 30\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    secret = "hf_" + "Kp4" * 11
    folder = tmp_path / "baseline"
    run, seen = trainer(folder)
    flags = ["--config", str(config), f"--hub_token={secret}"]
    capture(folder, flags, steps=20, doctor={"checks": [], "summary": {}}, run=run)
    names = {path.name for path in folder.iterdir()}
    assert names == {"baseline_report.txt", "telemetry.jsonl", "nvidia_smi.log", "doctor.json", "run"}
    assert stat.S_IMODE((folder / "telemetry.jsonl").stat().st_mode) == 0o600
    report = (folder / "baseline_report.txt").read_text()
    assert "throughput" in report
    assert " GiB ± " in report, "bytes are for people"
    assert secret not in report
    assert "--max_train_steps=20" in seen[0].command
    assert seen[0].environment["SIMPLETUNER_GH200_TELEMETRY"] == "1"
    with pytest.raises(UsageError, match="already"):
        capture(folder, flags, steps=20, doctor={}, run=run)


def test_capture_in_json_is_one_line_with_its_metrics(tmp_path: Path, config: Path, monkeypatch, gh200) -> None:
    run, _seen = trainer(tmp_path / "baseline")
    monkeypatch.setattr("simpletuner_gh200.operate.baseline.capture", partial(capture, run=run))
    words = ("--steps", 20, "-o", tmp_path / "baseline", "--json", "--", "--config", config)
    code, out, err = gh200("baseline", "capture", *words)
    assert code == 0, err
    (line,) = out.splitlines()
    told = json.loads(line)
    assert told["folder"] == str(tmp_path / "baseline") and told["steps"] > 0
    assert told["metrics"]["throughput (samples/s)"]["value"] > 0


def test_a_failed_run_is_no_baseline(tmp_path: Path, config: Path) -> None:
    run, _seen = trainer(tmp_path / "baseline", exit_code=1)
    with pytest.raises(RunFailed, match="exit code 1"):
        capture(tmp_path / "baseline", ["--config", str(config)], steps=20, doctor={}, run=run)
    assert not (tmp_path / "baseline" / "baseline_report.txt").exists()


def test_nsys_is_obeyed_or_refused(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = trainer(tmp_path / "a")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="Nsight"):
        capture(tmp_path / "a", ["--config", str(config)], steps=20, doctor={}, nsys=True, run=run)
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    capture(tmp_path / "a", ["--config", str(config)], steps=20, doctor={}, nsys=True, run=run)
    assert seen[0].command[:2] == ("nsys", "profile")


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.5, 1)])
def test_the_exit_code_of_compare(tmp_path: Path, gh200, slower: float, code: int) -> None:
    for name, run in (("a", run_of(1)), ("b", run_of(2, slower=slower))):
        sink = JsonLines(tmp_path / name / "telemetry.jsonl")
        for record in run.steps:
            sink.write(record)
    ended, out, _err = gh200("baseline", "compare", tmp_path / "a", tmp_path / "b", "--json")
    (line,) = out.splitlines()
    assert (ended, json.loads(line)["ok"]) == (code, code == 0)


def test_a_baseline_lies_beside_the_run_that_is_named_and_is_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gh200
) -> None:
    output, config = tmp_path / "output", tmp_path / "config" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_family": "sdxl", "output_dir": str(output)}))
    run, seen = trainer(output / "gh200" / "baseline")
    monkeypatch.setattr("simpletuner_gh200.operate.baseline.capture", partial(capture, run=run))
    code, _out, shown = gh200("baseline", "compare", tmp_path)
    assert code == 2 and "no telemetry" in shown
    sink = JsonLines(output / "gh200" / "telemetry.jsonl")
    for record in run_of(2, slower=2.0).steps:
        sink.write(record)
    code, _out, shown = gh200("baseline", "compare", tmp_path)
    assert code == 2 and "gh200 baseline capture" in shown
    code, _out, shown = gh200("baseline", "capture", output, "--steps", 20, "--", "--seed=7")
    assert code == 0, shown
    assert "--seed=7" in seen[0].command and str(config.with_suffix("")) in str(seen[0])
    code, out, _shown = gh200("baseline", "compare", tmp_path, "--json")
    assert code == 1 and not json.loads(out)["ok"], "the run is slower"
    monkeypatch.chdir(tmp_path)
    assert gh200("baseline", "compare")[0] == 1, "nothing named"
    code, _out, shown = gh200("baseline", "capture", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in shown
