"""The accessors that the earlier guides name on ``StateTracker``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _class(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    override: dict[str, Any] = {}

    def get_raw_config(cls: Any) -> Any:
        """SimpleTuner's parsed configuration, with our blocks as they were given."""
        return override.get("raw", runtime.raw_config)

    def set_raw_config(cls: Any, value: Any) -> None:
        override["raw"] = value

    def get_gh200_runtime_config(cls: Any) -> Any:
        """Our effective settings, as ``{"block.key": value}``."""
        if "runtime" in override:
            return override["runtime"]
        return {key: value for key, value, _ in runtime.settings.rows()} if runtime.settings else {}

    def set_gh200_runtime_config(cls: Any, value: Any) -> None:
        override["runtime"] = value

    accessors = (get_raw_config, set_raw_config, get_gh200_runtime_config, set_gh200_runtime_config)
    return [put(module.StateTracker, method.__name__, classmethod(method)) for method in accessors]


SEAMS = (Seam("state_tracker.class", _class),)
