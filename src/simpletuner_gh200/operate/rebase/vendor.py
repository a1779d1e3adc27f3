"""Our package inside the tree: copied as it is under ``simpletuner/gh200/vendor``, and hooked in with three lines."""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
from pathlib import Path

from simpletuner_gh200.errors import RunFailed
from simpletuner_gh200.older_names import SUBMODULES
from simpletuner_gh200.operate.rebase import operators
from simpletuner_gh200.operate.rebase.components import (
    HOME,
    PACKAGE,
    VENDOR,
    Component,
    all_components,
    files_of,
    package_folder,
)
from simpletuner_gh200.operate.rebase.journal import write_whole

HOOKED = "simpletuner/__init__.py"
HOOK = (
    '__import__("sys").modules.pop("simpletuner.gh200", None)\n'
    "from simpletuner.gh200 import activate_unless_disabled as _gh200  # noqa: E402\n\n_gh200()\n"
)
"""The first line lets go of the alias that an installed simpletuner-gh200 leaves there: the tree's own package wins."""

ENTRY = '''"""simpletuner-gh200, vendored: see docs/GH200_PATCH_MANIFEST.md. `SIMPLETUNER_GH200=0` turns it off."""

import os
import sys
from pathlib import Path
from typing import Any

_VENDOR = str(Path(__file__).parent / "vendor")
if _VENDOR not in sys.path:
    sys.path.insert(0, _VENDOR)


def activate_unless_disabled() -> None:
    """Register post-import hooks; nothing heavy is imported, and nothing changes unless the configuration asks."""
    if os.environ.get("SIMPLETUNER_GH200") != "0":
        from simpletuner_gh200.seams.bootstrap import activate

        activate()


def __getattr__(name: str) -> Any:
    from simpletuner_gh200.api import resolve_name

    return resolve_name(name, __name__)
'''

SHIMS = {
    f"{HOME}/__init__.py": ENTRY,
    **{
        f"{HOME}/{name}.py": (package_folder() / "older_names" / f"{name}.py").read_text("utf-8") for name in SUBMODULES
    },
    f"{VENDOR}/__init__.py": "",
}


def vendored_path(relative: Path) -> str:
    return f"{VENDOR}/{PACKAGE}/{relative.as_posix()}"


def copy_component(root: Path, component: Component) -> list[str]:
    """Copy the component's files into the tree; their paths there."""
    paths = []
    for relative in files_of(component):
        target = root / vendored_path(relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package_folder() / relative, target)
        paths.append(vendored_path(relative))
    return paths


def write_entry(root: Path) -> list[str]:
    """The package ``simpletuner.gh200``: the way in, and what has to be installed for it."""
    for path, text in SHIMS.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(root / path, text)
    requirements = f"{HOME}/requirements.txt"
    write_whole(root / requirements, "".join(f"{line}\n" for line in _requirements()))
    return [*SHIMS, requirements]


def add_hook(root: Path) -> list[str]:
    """Three lines at the end of SimpleTuner's own package file; adding them twice is the same as once."""
    path = root / HOOKED
    text = path.read_text(encoding="utf-8")
    if HOOK not in text:
        changed = text.rstrip("\n") + "\n\n" + HOOK
        try:
            ast.parse(changed)
        except SyntaxError as broken:
            raise RunFailed(f"{HOOKED} does not parse with the hook at its end: {broken}") from broken
        write_whole(path, changed)
    return [HOOKED]


def manifest(root: Path, onto: str) -> str:
    """``docs/GH200_PATCH_MANIFEST.md``: what was brought in, how large, how risky."""
    lines = [
        "# GH200 patch manifest",
        "",
        f"Brought into SimpleTuner at `{onto}` by `gh200 rebase`. One commit per row; upstream's files change in the",
        "last row only.",
        "",
        "| component | purpose | files | lines | risk |",
        "|---|---|---|---|---|",
    ]
    for component in all_components():
        paths = [vendored_path(relative) for relative in files_of(component)]
        lines.append(
            f"| {component.name} | {component.purpose} | {len(paths)} | {_lines(root, paths)} | {component.risk} |"
        )
    entry = [*SHIMS, f"{HOME}/requirements.txt"]
    lines.append(f"| entry | `simpletuner.gh200` | {len(entry)} | {_lines(root, entry)} | none: new files |")
    count = HOOK.count("\n") - HOOK.count("\n\n")
    lines.append(
        f"| hook | end of `{HOOKED}` | 1 | {count} | low: registers import hooks, `SIMPLETUNER_GH200=0` disables |"
    )
    copied = [path for path, content in operators.contents().items() if _is(root / path, content)]
    place = f"`scripts`, `config`, `{operators.PAGES}`, `gh200` and the programs of the guides"
    lines.append(f"| operator files | {place} | {len(copied)} | {_lines(root, copied)} | none: new files |")
    return "\n".join([*lines, "", f"Install what it needs: `pip install -r {HOME}/requirements.txt`.", ""])


def _requirements() -> list[str]:
    declared = importlib.metadata.requires("simpletuner-gh200") or []
    return [requirement for requirement in declared if "extra ==" not in requirement]


def _is(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _lines(root: Path, paths: list[str]) -> int:
    return sum((root / path).read_bytes().count(b"\n") for path in paths)
