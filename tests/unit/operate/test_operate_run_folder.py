"""A run is named by its output folder, its project folder or its file; whatever is not there is an error that helps."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.run_folder import caches_of, configuration_of, newest_run, output_of, telemetry_of
from simpletuner_gh200.telemetry.sink import JsonLines


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "config").mkdir(parents=True)
    (folder / "results" / "gh200").mkdir(parents=True)
    (folder / "results" / "gh200" / "telemetry.jsonl").write_text('{"kind": "start"}\n')
    (folder / "packs").mkdir()
    config = {"output_dir": "results", "cache_config": {"cache_dir": "packs"}}
    (folder / "config" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "named", ["", "results", "results/gh200", "results/gh200/telemetry.jsonl", "config/config.json"]
)
def test_a_run_by_any_of_its_names(project: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_of(project / named) == project / "results" / "gh200" / "telemetry.jsonl"
    monkeypatch.chdir(project)
    assert telemetry_of(None).absolute() == telemetry_of(project / named), "or by none"


def test_the_run_that_goes_on_comes_before_one_that_ended_later(tmp_path: Path) -> None:
    for name, records in (("live", [{"pid": os.getpid()}]), ("over", [{"pid": os.getpid()}, {}])):
        sink = JsonLines(tmp_path / "output" / name / "gh200" / "telemetry.jsonl")
        for kind, record in zip(("start", "end"), records, strict=False):
            sink.write({"kind": kind, "time": time.time(), "host": platform.node(), **record})
    os.utime(tmp_path / "output" / "live" / "gh200" / "telemetry.jsonl", (time.time() - 60,) * 2)
    assert newest_run(tmp_path) == tmp_path / "output" / "live" / "gh200" / "telemetry.jsonl"
    assert telemetry_of(tmp_path / "output") == newest_run(tmp_path), "a folder of several outputs"


def test_a_baseline_beside_a_run_is_not_the_newest_run(project: Path) -> None:
    inside = project / "results" / "gh200" / "baseline" / "run" / "gh200" / "telemetry.jsonl"
    inside.parent.mkdir(parents=True)
    inside.write_text('{"kind": "start"}\n')
    assert newest_run(project / "results") == project / "results" / "gh200" / "telemetry.jsonl"


def test_the_configuration_of_a_run(project: Path, tmp_path: Path) -> None:
    """Its output folder may lie anywhere; a folder beside it is another's."""
    config = project / "config" / "config.json"
    (project / "other").mkdir()
    config.write_text(json.dumps({"output_dir": str(project / "results")}))
    for named in (project, config, project / "results"):
        assert configuration_of(named) == config
    assert configuration_of(project / "other") is None


def test_a_project_whose_configuration_says_nothing_or_is_broken(project: Path) -> None:
    (project / "results").rename(project / "output")
    for content in ("{}", "{"):
        (project / "config" / "config.json").write_text(content)
        assert output_of(project) == project / "output"


def test_an_absolute_output_folder(project: Path, tmp_path: Path) -> None:
    (project / "results").rename(tmp_path / "far away")
    (project / "config" / "config.json").write_text(json.dumps({"output_dir": str(tmp_path / "far away")}))
    assert output_of(project) == tmp_path / "far away"


def test_a_folder_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for ask in (output_of, telemetry_of, caches_of):
        with pytest.raises(UsageError, match="nowhere") as refused:
            ask(tmp_path / "nowhere")
        assert "project" in str(refused.value.remedy)
    with pytest.raises(UsageError, match="no telemetry"):
        telemetry_of(tmp_path)
    with pytest.raises(UsageError, match="no run"):
        newest_run(tmp_path)


def test_packs_of_a_project_and_of_an_output_folder(project: Path) -> None:
    assert caches_of(project) == project / "packs"
    assert caches_of(project / "packs") == project / "packs"
    (project / "results" / "gh200" / "cache").mkdir()
    assert caches_of(project / "results") == project / "results" / "gh200" / "cache"
    (project / "config" / "config.json").write_text(json.dumps({"output_dir": "results"}))
    assert caches_of(project) == project / "results" / "gh200" / "cache"
