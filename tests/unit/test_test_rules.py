"""The rules that the tests themselves are run by: what runs on every release, and what CI may skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ci_skips, releases


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def late():\n    from simpletuner.helpers import state",
        "pytest.importorskip('accelerate')",
        "PACKAGE = installed_package('simpletuner')",
        "find_spec('simpletuner.helpers.caching')",
    ],
)
def test_a_file_that_imports_or_names_what_differs_runs_on_every_release(tmp_path: Path, source: str) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(source)
    assert releases.depends(path)


@pytest.mark.parametrize(
    "source", ["import numpy", "from simpletuner_gh200.units import MIB", "'''simpletuner is named in a text'''"]
)
def test_any_other_runs_once(tmp_path: Path, source: str) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(source)
    assert not releases.depends(path)


def test_a_conftest_counts_for_its_folder() -> None:
    files = list(releases.files_of(releases.TESTS / "unit" / "cache" / "test_of_tomorrow.py"))
    assert releases.TESTS / "unit" / "cache" / "conftest.py" in files
    assert any(map(releases.depends, files[1:])), "its fixtures save with torch"


def test_a_skip_is_allowed_for_its_reason_only() -> None:
    place = "tests/gpu/test_memory_gpu.py::test_x"
    assert ci_skips.allowed(place, "Skipped: no CUDA device")
    assert not ci_skips.allowed(place, "Skipped: no gcc to build with")
    assert not ci_skips.allowed("tests/unit/operate/test_operate_report.py::test_x", "Skipped: no Chromium")
