"""SimpleTuner's package itself: ``simpletuner.gh200`` and its submodules, as the earlier guides use them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from simpletuner_gh200.older_names import PLACE, SUBMODULES, Alias
from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.upstream.spec import SeamSpec


def _alias(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    if any(Path(place, "gh200", "__init__.py").is_file() for place in getattr(module, "__path__", ())):
        return []  # a tree with a package of its own there
    package = Alias()
    ours = {f"{PLACE}.{name}": importlib.import_module(f"simpletuner_gh200.older_names.{name}") for name in SUBMODULES}
    return [put(module, "gh200", package), *(put(sys.modules, *found) for found in {PLACE: package, **ours}.items())]


PACKAGE = SeamSpec(
    name=PLACE,
    module="simpletuner",
    qualname="__name__",
    parameters=None,
    features=(),
    reason="the earlier guides import from simpletuner.gh200",
)

SEAMS = (Seam(PACKAGE.name, _alias, own_spec=PACKAGE),)
