"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simpletuner_gh200.cli.commands.upstream import app
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.source import installed_package
from tests.unit.upstream.upstream_samples import write_wheel

needs_simpletuner = pytest.mark.skipif(installed_package("simpletuner") is None, reason="no SimpleTuner installed")
EMPTY = {"simpletuner/__init__.py": "__version__ = '9.0'\n", "simpletuner/helpers/__init__.py": ""}


@needs_simpletuner
def test_the_installed_release_passes_and_json_is_one_object() -> None:
    done = CliRunner().invoke(app, ["check", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert {row["status"] for row in found["seams"]} <= {"ok", "absent"}
    assert set(found["features"].values()) == {"on"}
    assert set(found["seams"][0]) == {"name", "status", "found", "expected", "feature"}


@needs_simpletuner
def test_the_table_ends_with_the_verdict() -> None:
    done = CliRunner().invoke(app, ["check"])
    assert done.stdout.splitlines()[-1].endswith("every seam holds")


def test_a_release_without_the_seams_fails_with_reasons(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "9.0", EMPTY)
    done = CliRunner().invoke(app, ["check", "--path", str(wheel), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["version"] == "9.0"
    assert found["features"]["core"].startswith("off: seam trainer.parse_arguments: no module")
    assert found["features"]["store"] != "on"


def test_all_goes_with_nothing_else() -> None:
    done = CliRunner().invoke(app, ["check", "--all", "--version", "3.1.6"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_code == 2
