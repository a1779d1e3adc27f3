"""``simpletuner.gh200``, the path of the earlier guides, wherever SimpleTuner and this package are both installed.

``import simpletuner`` takes seconds and imports torch, and Python imports a package before what is in it, unless that
is in ``sys.modules`` already. So the ``.pth`` line puts an empty module there at every interpreter start, and whoever
asks it for a name ends up here. Then it is decided what the name means: nothing without SimpleTuner; what a tree with
a ``gh200`` of its own (a vendored one) has there; else ours. The files beside this one are its submodules.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from simpletuner_gh200 import api

PLACE = "simpletuner.gh200"
SUBMODULES = ("uvm", "in_memory_backend")
TREES_OWN = "activate_unless_disabled"
"""What a tree with the package in it asks its own ``gh200`` for, and ours has not."""


def answer(name: str) -> Any:
    """What the module at ``simpletuner.gh200`` has under a name."""
    if name not in {*api.PUBLIC_NAMES, TREES_OWN, "__path__", "__all__", *SUBMODULES}:
        # Whoever looks through every module, as inspect and pickle do, must find out at once.
        raise AttributeError(f"module {PLACE!r} has no attribute {name!r}")
    package = _simpletuner()
    if package is None:
        if name.startswith("__"):
            raise AttributeError(f"module {PLACE!r} has no attribute {name!r}")
        raise ModuleNotFoundError("No module named 'simpletuner'", name="simpletuner")
    if (package / "gh200" / "__init__.py").is_file():
        return getattr(_trees_own(package / "gh200"), name)
    if name in SUBMODULES:
        return importlib.import_module(f"{PLACE}.{name}")
    if name == "__path__":
        return [str(Path(__file__).parent)]
    return list(api.PUBLIC_NAMES) if name == "__all__" else api.resolve_name(name, PLACE)


def _simpletuner() -> Path | None:
    """Its folder, without importing it."""
    loaded = sys.modules.get("simpletuner")
    if loaded is not None:
        places = getattr(loaded, "__path__", None)
    else:
        found = importlib.util.find_spec("simpletuner")
        places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _trees_own(folder: Path) -> ModuleType:
    """The tree's package takes our place; loaded by itself, since it needs nothing of the one around it."""
    there = sys.modules.get(PLACE)
    if there is not None and getattr(there, "__spec__", None) is not None:
        return there
    spec = importlib.util.spec_from_file_location(
        PLACE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PLACE] = module
    spec.loader.exec_module(module)
    return module
