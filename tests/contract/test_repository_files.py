"""What the hosting site reads is as its schemas say: workflows, issue forms, the citation. None of it has run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.dev.environments import ROOT, run_uv

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    tool = ("tool", "run", "--quiet", "--constraints", ROOT / "constraints" / "tools.txt", "check-jsonschema")
    return run_uv(*tool, "--builtin-schema", schema, *files)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_for_the_hosting_site_are_valid(schema: str, files: list[Path]) -> None:
    assert files
    ran = check(schema, *files)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_schema_check_sees_a_broken_workflow(tmp_path: Path) -> None:
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs-in:"))
    assert check("vendor.github-workflows", broken).returncode == 1


def test_workflows_type_what_a_person_types() -> None:
    """Every target that a workflow calls exists."""
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    called = {name for path in WORKFLOWS for name in re.findall(r"run: make ([a-z0-9-]+)", path.read_text())}
    assert called >= {"check", "wheel", "sweep"}
    assert called <= targets


def test_the_hooks_for_a_commit_are_the_linters_of_make() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"entry: (.+)", text) == ["make lint"]
