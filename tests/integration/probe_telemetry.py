"""Remember what goes to the trackers."""

from __future__ import annotations

from typing import Any


def install(record: dict[str, Any]) -> None:
    from accelerate import Accelerator

    original = Accelerator.log
    record.update(logged=[], logged_names=[])

    def log(
        self: Any, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> Any:
        record["logged"].append(step)
        record["logged_names"] = sorted(set(record["logged_names"]) | set(values))
        return original(self, values, step=step, log_kwargs=log_kwargs or {})

    Accelerator.log = log
