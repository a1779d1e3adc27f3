"""Generated pages are as the code would write them now, and what is public is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.dev import generate_docs
from simpletuner_gh200.api import PUBLIC_NAMES, available_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_generated_pages_are_fresh(name):
    (path,) = [path for path in generate_docs.pages() if path.name == name]
    assert path.read_text(encoding="utf-8") == generate_docs.pages()[path], "stale: run `make docs`"


def test_every_public_name_exists_and_is_documented():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert set(available_names()) == set(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert f"`{name}" in page, name


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []
