"""Seam 5: the configuration was read and the accelerator exists; settings are resolved and features start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.errors import GH200Error
from simpletuner_gh200.seams.configure import configure_from
from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.seams.tracker_log import observe_log


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        runtime.phases.end("import")
        _speak_again()
        result = wrapped(*args, **kwargs)
        try:
            configure_from(instance, runtime)
        except GH200Error as failure:
            runtime.outcome.fail(failure)
            raise
        observe_log(getattr(instance, "accelerator", None), runtime)
        runtime.call("start", instance)
        runtime.phases.end("configure")
        return result

    return [wrap_method(module.Trainer, "parse_arguments", after)]


def _speak_again() -> None:
    """Releases up to 3.x configure logging so that every logger made before it is silenced, ours among them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "simpletuner_gh200":
            logger.disabled = False


SEAM = Seam("trainer.parse_arguments", _patches)
