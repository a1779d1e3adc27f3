"""The rooms of the package, in the order they are brought in: each is one commit with a purpose and a risk.

Nothing is listed here. The rooms are the package's folders, their order is that of the layers, which their imports
tell, and their purpose is the first line of their own description: a new room is brought in without anyone's doing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import simpletuner_gh200
from simpletuner_gh200.operate.shipped import FOLDER

HOME = "simpletuner/gh200"
VENDOR = f"{HOME}/vendor"
PACKAGE = "simpletuner_gh200"


@dataclass(frozen=True)
class Component:
    """A folder directly in the package; the foundation is what lies beside them."""

    name: str
    purpose: str
    risk: str = "none: new files"


FOUNDATION = Component("foundation", "What everything else uses.")


def package_folder() -> Path:
    return Path(next(iter(simpletuner_gh200.__path__)))


def all_components() -> tuple[Component, ...]:
    """The foundation, then every room after those it uses."""
    return (FOUNDATION, *_rooms(package_folder()))


def files_of(component: Component) -> list[Path]:
    """Paths relative to the package, sorted; no bytecode."""
    package = package_folder()
    if component is FOUNDATION:
        return sorted(path.relative_to(package) for path in package.iterdir() if path.is_file())
    return sorted(path.relative_to(package) for path in _files(package / component.name))


@cache
def _rooms(package: Path) -> tuple[Component, ...]:
    # What a wheel ships beside the code goes elsewhere in a tree: operate/rebase/operators.py.
    folders = [path for path in package.iterdir() if path.is_dir() and path.name != FOLDER and any(_files(path))]
    names = {folder.name for folder in folders}
    waiting = TopologicalSorter({folder.name: (_used_by(folder) & names) - {folder.name} for folder in folders})
    waiting.prepare()
    rooms: list[Component] = []
    while waiting.is_active():
        ready = sorted(waiting.get_ready())
        rooms += [Component(name, _purpose(package / name / "__init__.py")) for name in ready]
        waiting.done(*ready)
    return tuple(rooms)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _used_by(room: Path) -> set[str]:
    """First names below the package that a room imports, wherever in its files."""
    modules: list[str] = []
    for path in _files(room):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    modules += [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    modules += [alias.name for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith(f"{PACKAGE}.")}


def _purpose(description: Path) -> str:
    text = ast.get_docstring(ast.parse(description.read_bytes())) if description.is_file() else None
    return text.splitlines()[0] if text else ""
