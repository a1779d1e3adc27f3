"""SimpleTuner on Grace-Hopper: in-memory datasets, unified-memory caches, an exact batch ramp."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    from simpletuner_gh200.api import resolve_name

    return resolve_name(name, __name__)


def __dir__() -> list[str]:
    from simpletuner_gh200.api import PUBLIC_NAMES

    return [*globals(), *PUBLIC_NAMES]
