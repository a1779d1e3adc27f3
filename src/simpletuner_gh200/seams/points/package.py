"""SimpleTuner's package itself: ``simpletuner.gh200`` and its submodules, as the earlier guides import them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200 import api
from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.upstream.spec import SeamSpec

_SUBMODULES = {"uvm": api.UVM_NAMES, "in_memory_backend": ("GH200InMemoryBackend",)}


class _Alias(ModuleType):
    """A module whose names are ours, resolved when they are asked for."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(name, "Names of simpletuner-gh200 under the path of the earlier guides.")
        self.__all__ = [found for found in api.available_names() if found in names]

    def __getattr__(self, name: str) -> Any:
        if name in self.__all__:
            return api.resolve_name(name, self.__name__)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _alias(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    package = _Alias("simpletuner.gh200", tuple(api.PUBLIC_NAMES))
    package.__path__ = []
    patches = [put(sys.modules, package.__name__, package), put(module, "gh200", package)]
    for name, names in _SUBMODULES.items():
        submodule = _Alias(f"{package.__name__}.{name}", names)
        setattr(package, name, submodule)
        patches.append(put(sys.modules, submodule.__name__, submodule))
    return patches


PACKAGE = SeamSpec(
    name="simpletuner.gh200",
    module="simpletuner",
    qualname="__name__",
    parameters=None,
    features=(),
    reason="the earlier guides import from simpletuner.gh200",
)

SEAMS = (Seam(PACKAGE.name, _alias, own_spec=PACKAGE),)
