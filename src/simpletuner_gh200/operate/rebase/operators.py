"""What an operator types in a tree, beside the package in it: scripts, configurations, pages and the commands.

Nothing that is there is replaced: neither a file of upstream's nor one that lies around, and what was kept is told.
"""

from __future__ import annotations

from pathlib import Path

from simpletuner_gh200.operate import shipped
from simpletuner_gh200.operate.rebase.components import HOME, VENDOR
from simpletuner_gh200.operate.rebase.journal import write_whole

PAGES = "documentation/gh200"
"""Where the pages go; upstream keeps its own beside it."""

PROGRAM = '''#!/usr/bin/env python3
"""`{meaning}`, with the package that this tree has in it."""

import os
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parent
PLACES = [str(TREE / "{vendor}"), str(TREE)]
sys.path[:0] = PLACES
os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])])

try:
    from {module} import main
except ModuleNotFoundError as missing:
    sys.exit(f"{{missing}}: run `pip install -r {{TREE}}/{home}/requirements.txt`")

if __name__ == "__main__":
    sys.argv[1:1] = {words!r}
    sys.exit(main())
'''
COMMAND = "simpletuner_gh200.cli.main"
PROGRAMS: dict[str, tuple[str, str, list[str]]] = {
    "gh200": ("gh200", COMMAND, []),
    "gh200_diagnostic.py": ("gh200 doctor", COMMAND, ["doctor"]),
    "train.py": ("python -m simpletuner_gh200.launch", "simpletuner_gh200.launch", []),
    "validate_uvm.py": ("gh200 selftest", COMMAND, ["selftest"]),
}
"""Name -> what it is, the module whose ``main`` it calls, words that go before what is typed."""


def contents() -> dict[str, bytes]:
    """Path in the tree -> content."""
    place = shipped.root()
    found = {name.as_posix(): (place / name).read_bytes() for name in shipped.names()}
    for page in shipped.names(shipped.PAGES):
        found[f"{PAGES}/{page.relative_to('docs').as_posix()}"] = (place / page).read_bytes()
    for name, (meaning, module, words) in PROGRAMS.items():
        found[name] = PROGRAM.format(meaning=meaning, vendor=VENDOR, home=HOME, module=module, words=words).encode()
    return found


def copy(root: Path) -> tuple[list[str], list[str]]:
    """Write what is not there yet; (paths that are ours, paths where something else was found and kept)."""
    ours: list[str] = []
    kept: list[str] = []
    for path, content in contents().items():
        target = root / path
        if target.exists() and target.read_bytes() != content:
            kept.append(path)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content, executable=content.startswith(b"#!"))
        ours.append(path)
    return ours, kept


def remove_copies(root: Path, tracked: set[str]) -> None:
    """Take out what was written and is not committed; a file that is not ours to the byte stays."""
    for path, content in contents().items():
        target = root / path
        if path not in tracked and target.is_file() and target.read_bytes() == content:
            target.unlink()
            _remove_empty(target.parent, root)


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
