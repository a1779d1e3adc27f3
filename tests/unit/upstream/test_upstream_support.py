"""The support table: generated, current, and in agreement with the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import support

PAGE = Path(__file__).parents[3] / "docs" / "support.md"


def test_the_page_is_current_and_only_its_block_is_written(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "support.md"
    copy.write_text(page)
    assert not support.write_page(copy), "run: gh200 upstream support --write docs/support.md"
    copy.write_text(page.replace(support.BEGIN, f"{support.BEGIN}\nold\n"))
    assert support.write_page(copy) and copy.read_text(encoding="utf-8") == page
    copy.write_text("nothing")
    with pytest.raises(UsageError, match="no block"):
        support.write_page(copy)


def test_executed_releases_are_known() -> None:
    assert set(support.EXECUTED) <= set(support.known_releases())


def test_releases_that_differ_get_rows_and_reasons_of_their_own() -> None:
    off = {"ramp": "off: seam trainer.train: 2 with-blocks"}
    table = support.support_table({"5.0": {}, "5.1": {}, "5.2": off})
    assert "| 5.0 to 5.1 | 2 |" in table
    assert "| 5.2 | 1 | source | ramp is off: seam trainer.train: 2 with-blocks |" in table
    assert support.support_rows({"5.0": {}})[0][3].startswith("all ")
