"""What the reference page says of a record, against a record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "telemetry.md"


def undescribed(record: Mapping[str, Any]) -> list[str]:
    """The paths in a record that the reference page has no row for; a ``*`` there stands for any name."""
    section = PAGE.read_text().partition(f"## `{record['kind']}` records")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return [path for path in paths(record) if not any(fnmatchcase(path, row) for row in rows)]


def paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"
