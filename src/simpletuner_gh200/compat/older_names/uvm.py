"""The placement hints under the name the earlier guides use."""

from typing import Any


def __getattr__(name: str) -> Any:
    from simpletuner_gh200.api import UVM_NAMES, resolve_name

    if name in UVM_NAMES:
        return resolve_name(name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
