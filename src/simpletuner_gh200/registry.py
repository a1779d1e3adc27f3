"""How capabilities plug in: a package folder in which every module exports one named contribution.

There is no central list. Adding a seam, a configuration part, a doctor check, a telemetry source, a demo
line, a benchmark suite or a subcommand means adding one file to the folder concerned.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def contributions(package: str, attribute: str, kind: type[T]) -> Iterator[T]:
    """Yield ``attribute`` of every module in ``package``, in module-name order.

    A module whose name starts with an underscore is private to the folder and contributes nothing.
    """
    folder = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda found: found.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        value = getattr(module, attribute, None)
        if not isinstance(value, kind):
            raise TypeError(f"{module.__name__} must define {attribute}: {kind.__name__}, found {value!r}")
        yield value
