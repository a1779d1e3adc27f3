"""What is said before a run starts that is to go on from a checkpoint."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from simpletuner_gh200.config.job import Job
from simpletuner_gh200.config.training import Training
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate import preflight
from tests.unit.upstream.test_upstream_checkpoints import write


@pytest.fixture
def output(tmp_path) -> Path:
    for step in (2, 10):
        write(tmp_path / f"checkpoint-{step}", guarded=True)
    return tmp_path


def said(output: Path, asked: str | None = "latest", ranks: int = 1, **more: object) -> str:
    values = {"output_dir": str(output), "resume_from_checkpoint": asked, **more}
    return "\n".join(preflight._about_resuming(Training("x", values=values, job=Job(ranks))))


def test_an_incomplete_newest_one_is_said_and_a_named_one_refused(output):
    assert said(output) == ""
    (output / "checkpoint-10" / "optimizer.bin").unlink()
    assert "this run resumes from checkpoint-2" in said(output)
    assert said(output, None) == ""
    with pytest.raises(UsageError, match="checkpoint-10 is incomplete"):
        said(output, "checkpoint-10")


@pytest.mark.parametrize(
    ("release", "ranks", "more", "mended"),
    [
        ("3.1.6", 4, {}, "4.9.3"),
        ("4.9.2", 2, {}, "4.9.3"),
        ("4.9.3", 4, {}, None),
        ("4.5.1", 4, {"fsdp_enable": True}, "4.5.2"),
        ("4.5.2", 4, {"fsdp_enable": True}, None),
        ("3.1.6", 1, {}, None),
        ("3.1.6", 4, {"ignore_final_epochs": True}, None),
        ("3.1.6", 4, {"resume_from_checkpoint": ""}, None),
        ("main-branch", 4, {}, None),
    ],
)
def test_several_ranks_that_resume_with_an_old_release_are_warned(output, monkeypatch, release, ranks, more, mended):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: release)
    more = {"resume_from_checkpoint": "latest", **more}
    words = said(output, more.pop("resume_from_checkpoint"), ranks, **more)
    assert words == "" if mended is None else f"Use {mended} or later, or set ignore_final_epochs" in words


def test_nothing_to_resume_is_nothing_to_warn_of(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "3.1.6")
    assert said(tmp_path, ranks=4) == ""
