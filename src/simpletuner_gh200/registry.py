"""How capabilities plug in: a package folder in which every module exports the contributions of one family.

There is no central list. Adding a seam, a benchmark suite or a subcommand
means adding an entry to the tuple of the module it belongs with, or one more module to the folder concerned.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def contributions(package: str, attribute: str, kind: type[T]) -> Iterator[T]:
    """Yield each element of the tuple ``attribute`` of every module in ``package``, in module-name order.

    A bare ``kind`` counts as a tuple of one. A module whose name starts with an underscore is private to the folder
    and contributes nothing; any other that has no such attribute, an empty tuple or something else in it is refused
    with a TypeError.
    """
    folder = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda found: found.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        value = getattr(module, attribute, None)
        given = (value,) if isinstance(value, kind) else value
        if not isinstance(given, tuple) or not given or not all(isinstance(one, kind) for one in given):
            raise TypeError(
                f"{module.__name__} must define {attribute}: {kind.__name__}, or a tuple of them, found {value!r}"
            )
        yield from given
