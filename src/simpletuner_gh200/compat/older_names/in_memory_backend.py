"""The in-memory backend under the name the earlier guides use."""

from typing import Any


def __getattr__(name: str) -> Any:
    from simpletuner_gh200.api import resolve_name

    if name == "GH200InMemoryBackend":
        return resolve_name(name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
