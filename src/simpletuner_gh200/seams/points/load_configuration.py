"""Seam 3: the dataset list, once it was read."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.datasets import with_in_memory_for_all
from simpletuner_gh200.seams.patch import AnyPatch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entries = with_in_memory_for_all(wrapped(*args, **kwargs), runtime.in_memory_for_all)
        for rewrite in runtime.moment("dataset_entries"):
            entries = rewrite(entries)
        return entries

    return [wrap_method(module.FactoryRegistry, "load_configuration", after)]


SEAM = Seam("datasets.load_configuration", _patches)
