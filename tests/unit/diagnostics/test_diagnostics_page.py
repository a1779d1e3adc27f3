"""The page of the doctor's codes is as the checks would write it now; the guides name only codes that exist."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.dev import generate_doctor_page
from simpletuner_gh200.diagnostics.check import all_checks

ROOT = Path(__file__).parents[3]


def test_the_page_is_fresh() -> None:
    assert generate_doctor_page.PAGE.read_text(encoding="utf-8") == generate_doctor_page.page(), (
        "stale: python scripts/dev/generate_doctor_page.py"
    )


def test_every_code_that_a_guide_names_exists() -> None:
    codes = {check.code for check in all_checks()}
    named = {
        code for page in (ROOT / "docs").rglob("*.md") for code in re.findall(r"\bGH[2-5]?\d{2,3}\b", page.read_text())
    }
    assert {code for code in named if code not in {"GH200"}} <= codes


def test_every_entry_of_troubleshooting_ends_in_a_command() -> None:
    text = (ROOT / "docs" / "operating" / "troubleshooting.md").read_text()
    entries = [entry for entry in text.split("\n\n") if entry.startswith("**")]
    assert len(entries) > 15
    for entry in entries:
        _, arrow, command = entry.partition("→")
        assert arrow, entry
        assert "`" in command, entry
