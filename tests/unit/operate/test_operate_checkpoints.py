"""What is said about checkpoints before a run starts that is to go on from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.operate.checkpoints import forgotten_positions, passed_over
from tests.unit.upstream.test_upstream_checkpoints import write


@pytest.fixture
def output(tmp_path) -> Path:
    for step in (2, 10):
        write(tmp_path / f"checkpoint-{step}", guarded=True)
    return tmp_path


def config(output: Path, asked: str | None = "latest", **more: object) -> dict[str, object]:
    return {"output_dir": str(output), "resume_from_checkpoint": asked, **more}


def test_an_incomplete_newest_one_is_said_and_a_named_one_refused(output):
    assert passed_over(config(output)) is None
    (output / "checkpoint-10" / "optimizer.bin").unlink()
    assert "this run resumes from checkpoint-2" in str(passed_over(config(output)))
    assert passed_over(config(output, None)) is None
    with pytest.raises(UsageError, match="checkpoint-10 is incomplete"):
        passed_over(config(output, "checkpoint-10"))


@pytest.mark.parametrize(
    ("release", "more", "mended"),
    [
        ("3.1.6", {"num_processes": 4}, "4.9.3"),
        ("4.9.2", {"num_processes": "2"}, "4.9.3"),
        ("4.9.3", {"num_processes": 4}, None),
        ("4.10.1", {"num_processes": 4}, None),
        ("4.5.1", {"num_processes": 4, "fsdp_enable": True}, "4.5.2"),
        ("4.5.2", {"num_processes": 4, "fsdp_enable": True}, None),
        ("3.1.6", {"num_processes": 1}, None),
        ("3.1.6", {}, None),
        ("3.1.6", {"num_processes": 4, "ignore_final_epochs": True}, None),
        ("3.1.6", {"num_processes": 4, "resume_from_checkpoint": ""}, None),
        ("main-branch", {"num_processes": 4}, None),
    ],
)
def test_several_ranks_that_resume_with_an_old_release_are_warned(output, release, more, mended):
    words = forgotten_positions({**config(output), **more}, release)
    assert (words is None) == (mended is None)
    assert words is None or f"Use {mended} or later, or set ignore_final_epochs" in words


def test_nothing_to_resume_is_nothing_to_warn_of(tmp_path):
    assert forgotten_positions({**config(tmp_path), "num_processes": 4}, "3.1.6") is None
