"""The files of the guides: all there, written where they are wanted, and the same in the wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.compat import shipped
from simpletuner_gh200.errors import UsageError

ROOT = Path(__file__).parents[3]
OF_THE_GUIDES = {
    "accelerate_config_gh200.yaml",
    "config/accelerate_config_gh200.yaml",
    "config/gh200_in_memory_example.json",
    "execute_gh200_rebase.sh",
    "gh200_diagnostic.py",
    "scripts/setup_gh200_env.sh",
    "scripts/test_combined_features.sh",
    "scripts/test_gh200_features.sh",
    "scripts/test_upstream_features.sh",
    "train.py",
    "validate_uvm.py",
}


def test_every_file_that_the_guides_name_is_written_and_programs_run(tmp_path):
    written = {str(path.relative_to(tmp_path)) for path in shipped.write(tmp_path)}
    assert written >= OF_THE_GUIDES
    assert os.access(tmp_path / "scripts" / "test_gh200_features.sh", os.X_OK)
    assert os.access(tmp_path / "train.py", os.X_OK)
    assert not (tmp_path / "accelerate_config_gh200.yaml").is_symlink()
    assert shipped.write(tmp_path), "the same again changes nothing and is no error"


def test_the_pages_are_written_when_they_are_asked_for(tmp_path):
    page = tmp_path / "docs" / "compat" / "migration.md"
    shipped.write(tmp_path)
    assert not page.exists()
    shipped.write(tmp_path, shipped.PAGES)
    assert page.is_file()


def test_a_file_that_differs_is_not_replaced_unasked(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(UsageError, match=r"train\.py"):
        shipped.write(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]
    shipped.write(tmp_path, force=True)
    assert (tmp_path / "train.py").read_text() != "mine"


def test_the_wheel_is_told_to_carry_all_of_it():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    inside = "simpletuner_gh200/shipped/"
    carried = [Path(source) for source, target in wheel["force-include"].items() if target == inside + source]
    names = shipped.names((*shipped.PATTERNS, *shipped.PAGES))
    assert [name for name in names if not any(name.is_relative_to(source) for source in carried)] == []


def test_the_command_lists_them():
    done = CliRunner().invoke(build_app(), ["examples", "--json"])
    assert set(json.loads(done.stdout.splitlines()[-1])["files"]) >= OF_THE_GUIDES


@pytest.mark.parametrize("name", ["train.py", "gh200_diagnostic.py", "validate_uvm.py"])
def test_a_clone_that_is_not_installed_says_what_to_type(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-I", "-S", shipped.root() / name], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("gh200: No module named 'simpletuner_gh200'. Install this clone first: ")
    assert "pip install '.[cuda,codecs]'" in ran.stderr


def test_the_examples_come_with_pictures_where_the_in_memory_one_looks_for_them(tmp_path: Path) -> None:
    """So that it is accepted as it is, on any machine: no other folder, and no size of memory that must be there."""
    done = CliRunner().invoke(build_app(), ["examples", str(tmp_path), "--data"])
    assert done.exit_code == 0, done.output
    pictures, _texts = json.loads((tmp_path / "config" / "gh200_in_memory_datasets.json").read_text())
    assert len(list((tmp_path / pictures["instance_data_dir"]).glob("*.png"))) == 24
    assert "memory_limit_gb" not in pictures["in_memory"]
    with pytest.raises(UsageError, match="no folder was named"):
        CliRunner().invoke(build_app(), ["examples", "--data"], catch_exceptions=False)
