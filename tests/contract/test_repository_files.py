"""What the hosting site reads is as its schemas say: workflows, issue forms, the citation. None of it has run."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.dev.environments import PINNED, ROOT, built_distribution, built_wheel, development_group, run_uv
from simpletuner_gh200.upstream.tested import TESTED

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


def test_the_quick_loop_builds_no_simpletuner_and_its_tools_are_pinned() -> None:
    """`make check` has an environment of its own, from the ``dev`` group."""
    said = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "environments.py check" in said
    assert "environments.py demo" not in said
    group = development_group(ROOT / "pyproject.toml")
    pins = [ROOT / "constraints" / "development.txt", PINNED / f"simpletuner-{TESTED[0].release}.txt"]
    pinned = {line.partition("==")[0] for file in pins for line in file.read_text().splitlines() if "==" in line}
    assert set(group) <= pinned
    assert not {"torch", "simpletuner"} & set(group)


def test_a_release_has_a_source_distribution_and_wheels_of_both_machines() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert {"make sdist", "make wheel"} <= set(re.findall(r"run: (make \w+)", text))
    assert 'GH200_BUILD_ALLOCATOR: "1"' in text
    assert "runner: [ubuntu-24.04, ubuntu-24.04-arm]" in text


def test_the_source_distribution_gives_the_wheel_again(tmp_path: Path) -> None:
    archive = built_distribution(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    again = built_wheel(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again")
    direct = built_wheel(ROOT, tmp_path / "direct")
    names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in (again, direct)]
    assert names[0] == names[1]
