"""Rows of the feature matrix that no other test stands for: other kinds of data, trained for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.workbench import clean_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
@pytest.mark.one_release("4.10.1")
def test_audio_trains_to_the_bit_as_stock(tmp_path):
    """ACE-Step over tones: stock SimpleTuner twice, then in-memory data and unified caches."""
    rows = matrix_rows("--audio", tmp_path)
    assert rows["C7"]["outcome"] == "passed", rows["C7"]
    assert "to the bit" in rows["C7"]["detail"]


@pytest.mark.matrix
def test_video_trains_from_memory_and_unified_caches(tmp_path):
    rows = matrix_rows("--video", tmp_path)
    assert rows["C8"]["outcome"] == "passed", rows["C8"]


@pytest.mark.matrix
def test_nothing_of_ours_fails(tmp_path):
    rows = matrix_rows(None, tmp_path, "test_gh200_features.sh")
    assert not [row for row in rows.values() if row["outcome"] == "failed"]
    assert {name for name, row in rows.items() if row["outcome"] == "passed"} >= {"G1", "G3", "G4", "G5", "G6", "G7"}


def matrix_rows(group: str | None, folder: Path, name: str = "test_combined_features.sh") -> dict[str, dict[str, str]]:
    script = str(ROOT / "scripts" / name)
    done = subprocess.run(
        [script, *filter(None, [group]), "--json", "--folder", str(folder)],
        env={**clean_environment(), "GH200_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-3000:]
    return {row["test"]: row for row in json.loads(lines[-1])["rows"]}
