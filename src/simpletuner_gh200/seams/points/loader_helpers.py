"""Seam: an explicit ``--config PATH`` in any format, and command-line flags that override the file.

SimpleTuner reads a TOML file only from its own ``config`` folder, and ignores flags whenever there is a file; what a
person typed after ``gh200 train`` is meant, so both are honoured here. Without either, its own loaders run untouched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.files import read_env_variables, read_training_config
from simpletuner_gh200.seams.patch import AnyPatch, EntryPatch
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    launch = runtime.launch
    if launch.config_path is None and not launch.flags:
        return []

    def loader(original: Callable[[], Any]) -> Callable[[], list[str]]:
        def load() -> list[str]:
            if launch.config_path is None:
                arguments = list(original())
            elif launch.config_path.endswith(".env"):
                # Its own loader knows what each variable means, and reads them from the environment.
                os.environ.update(read_env_variables(launch.config_path))
                arguments = list(original())
            else:
                arguments = module.json_file.normalize_args(read_training_config(launch.config_path))
            return [*arguments, *launch.flags]

        return load

    return [EntryPatch(module.helpers, name, loader(module.helpers[name])) for name in ("json", "toml", "env")]


SEAM = Seam("config.loader_helpers", _patches)
