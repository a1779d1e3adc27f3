"""Values on their way to the trackers: features may add theirs. Wraps ``accelerator.log`` on the instance."""

from __future__ import annotations

from typing import Any

from simpletuner_gh200.seams.runtime import Runtime


def observe_log(accelerator: Any, runtime: Runtime) -> None:
    """Let features see and extend what the accelerator logs; without a feature that does, nothing is wrapped."""
    if accelerator is None or not runtime.moment("log_values"):
        return
    original = accelerator.log

    def log(values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> Any:
        for method in runtime.moment("log_values"):
            method(values, step)
        return original(values, step=step, log_kwargs=log_kwargs or {})

    accelerator.log = log
