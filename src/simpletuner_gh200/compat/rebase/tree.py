"""What is brought into a tree: the package; the way in; the hook; and what an operator types there."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import simpletuner_gh200
from simpletuner_gh200.compat import older_names, shipped
from simpletuner_gh200.compat.rebase.repository import write_whole
from simpletuner_gh200.errors import RunFailed

HOME = "simpletuner/gh200"
VENDOR = f"{HOME}/vendor"
PAGES = "documentation/gh200"
"""Where our pages go; upstream keeps its own next to it."""

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


@dataclass(frozen=True)
class Component:
    """One commit of the new branch, and one row of its manifest."""

    name: str
    purpose: str
    write: Callable[[Path], list[str]]
    """Put it into the tree; the paths there. Doing it twice is the same as once."""
    step: str
    risk: str = "none: new files"


def all_components() -> tuple[Component, ...]:
    on = "low: registers import hooks, `SIMPLETUNER_GH200=0` disables"
    operators = f"`scripts`, `config`, `{PAGES}`, `gh200` and the programs of the guides"
    return (
        Component("package", "`simpletuner_gh200`, all of it", partial(_write_all, package_files), "vendor package"),
        Component("entry", "`simpletuner.gh200`, the way in", partial(_write_all, entry_files), "entry"),
        Component("hook", f"end of `{HOOKED}`", add_hook, "hook", on),
        Component("operator files", operators, write_operator_files, "operator files"),
    )


def package_folder() -> Path:
    return Path(next(iter(simpletuner_gh200.__path__)))


def package_files() -> dict[str, bytes]:
    """But for what a wheel ships beside the code, which is copied to where an operator looks for it."""
    package = package_folder()
    files = (path.relative_to(package) for path in sorted(package.rglob("*")) if path.is_file())
    kept = [path for path in files if "__pycache__" not in path.parts and path.parts[0] != shipped.FOLDER]
    return {f"{VENDOR}/{simpletuner_gh200.__name__}/{path}": (package / path).read_bytes() for path in kept}


def _write_all(contents: Callable[[], dict[str, bytes]], root: Path) -> list[str]:
    found = contents()
    for path, content in found.items():
        write_whole(root / path, content)
    return list(found)


def entry_files() -> dict[str, bytes]:
    """The package ``simpletuner.gh200``: the way in, and what has to be installed for it."""
    names = Path(older_names.__file__).parent
    declared = importlib.metadata.requires("simpletuner-gh200") or []
    needed = "".join(f"{requirement}\n" for requirement in declared if "extra ==" not in requirement)
    return {
        f"{HOME}/__init__.py": ENTRY.encode(),
        **{f"{HOME}/{name}.py": (names / f"{name}.py").read_bytes() for name in older_names.SUBMODULES},
        f"{VENDOR}/__init__.py": b"",
        f"{HOME}/requirements.txt": needed.encode(),
    }


def add_hook(root: Path) -> list[str]:
    """Three statements at the end of SimpleTuner's own package file, the only one of its files that changes."""
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


def operator_files() -> dict[str, bytes]:
    """What an operator types in a tree: scripts, configurations, pages and the commands."""
    place = shipped.root()
    found = {name.as_posix(): (place / name).read_bytes() for name in shipped.names()}
    for page in shipped.names(shipped.PAGES):
        found[f"{PAGES}/{page.relative_to('docs').as_posix()}"] = (place / page).read_bytes()
    for name, (meaning, module, words) in PROGRAMS.items():
        found[name] = PROGRAM.format(meaning=meaning, vendor=VENDOR, home=HOME, module=module, words=words).encode()
    return found


def write_operator_files(root: Path) -> list[str]:
    """Nothing that is there is replaced, neither a file of upstream's nor one that lies around."""
    kept = kept_files(root)
    return _write_all(lambda: {path: text for path, text in operator_files().items() if path not in kept}, root)


def kept_files(root: Path) -> list[str]:
    """Where something else lies than we would write."""
    wanted = operator_files().items()
    return [path for path, content in wanted if (root / path).exists() and (root / path).read_bytes() != content]
