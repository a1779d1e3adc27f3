#!/usr/bin/env python3
"""Print the changelog's section for a tag; exit code 1 where tag, version and changelog do not belong together.

python3 scripts/dev/release_notes.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(tag: str) -> int:
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "src/simpletuner_gh200/__init__.py").read_text())
    if version is None or tag != f"v{version[1]}":
        print(f"tag {tag!r} does not name the package's version, {version and version[1]!r}", file=sys.stderr)
        return 1
    notes = section((ROOT / "CHANGELOG.md").read_text(), version[1])
    if notes is None:
        print(f"CHANGELOG.md has no section '## {version[1]} (year-month-day)'", file=sys.stderr)
        return 1
    print(notes)
    return 0


def section(changelog: str, version: str) -> str | None:
    """What stands below the dated heading of a version, up to the next version's."""
    heading = re.compile(rf"^## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)\n(.*?)(?=^## |\Z)", re.M | re.S)
    found = heading.search(changelog)
    return found[1].strip() if found else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
