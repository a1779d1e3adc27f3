"""What the package index shows, and what a tag needs before it becomes a release."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from scripts.dev import release_notes
from scripts.dev.environments import ROOT, built_wheel

ADDRESS = "https://example.org/someone/simpletuner-gh200"


def metadata(tmp_path: Path, repository: str) -> Message:
    """Of a wheel that is really built, from a tree with another address in its one setting."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "scripts" / "packaging", tree / "scripts" / "packaging")
    package = tree / "src" / "simpletuner_gh200"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "simpletuner_gh200" / "__init__.py", package)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count('\nrepository = ""\n') == 1
    project = "".join(line for line in project.splitlines(keepends=True) if "simpletuner_gh200/shipped/" not in line)
    (tree / "pyproject.toml").write_text(project.replace('\nrepository = ""\n', f'\nrepository = "{repository}"\n'))
    with zipfile.ZipFile(built_wheel(tree, tmp_path)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def test_links_on_the_package_index_lead_to_the_released_files(tmp_path: Path) -> None:
    found = metadata(tmp_path, ADDRESS)
    text = str(found.get_payload())
    assert f"({ADDRESS}/blob/v{found['Version']}/docs/quick-start.md)" in text
    assert "](docs/" not in text
    assert f"Issues, {ADDRESS}/issues" in found.get_all("Project-URL", [])


def test_without_an_address_no_link_is_promised(tmp_path: Path) -> None:
    found = metadata(tmp_path, "")
    text = str(found.get_payload())
    assert "Quick start" in text
    assert "](docs/" not in text
    assert found.get_all("Project-URL") is None


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("## 0.1.0 (2026-01-31)", "- news"),
        ("## Unreleased", None),
        ("## 0.1.0", None),
        ("## 0.1.0rc1 (2026-01-31)", None),
    ],
)
def test_a_release_has_a_dated_section(heading: str, expected: str | None) -> None:
    log = f"# Changelog\n\n{heading}\n\n- news\n\n## 0.0.9 (2025-12-01)\n\n- old\n"
    assert release_notes.section(log, "0.1.0") == expected


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    script = ROOT / "scripts" / "dev" / "release_notes.py"
    ran = subprocess.run([sys.executable, str(script), "v999.0"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "'v999.0' does not name the package's version" in ran.stderr
