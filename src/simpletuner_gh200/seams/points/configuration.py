"""A configuration's way to SimpleTuner's parser: our blocks go along, and what a person typed is what is meant.

SimpleTuner drops a block it does not know, reads a TOML file only from its own ``config`` folder, and ignores flags
whenever there is a file. Without a block of ours, ``--config`` or flags, its own loaders run untouched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.files import read_training_config, read_written
from simpletuner_gh200.config.legacy import LEGACY_FLAG, OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.memory.mapping import create_memfd
from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam

Handler = Callable[[object, list[str], dict[str, object]], bool]


def _block_handler(block: str) -> Handler:
    def handle(value: object, cli_args: list[str], extras: dict[str, object]) -> bool:
        text = value if isinstance(value, str) else json.dumps(value)
        cli_args.append(f"--{block}={text}")
        return True

    return handle


def _older_handler(key: str) -> Handler:
    """Collect older spellings into one flag: argparse keeps only the last of a repeated one."""
    prefix = f"--{LEGACY_FLAG}="

    def handle(value: object, cli_args: list[str], extras: dict[str, object]) -> bool:
        collected = {}
        for index, argument in enumerate(cli_args):
            if argument.startswith(prefix):
                collected = json.loads(argument[len(prefix) :])
                del cli_args[index]
                break
        collected[key] = value
        cli_args.append(prefix + json.dumps(collected))
        return True

    return handle


def _inline_datasets(value: object, cli_args: list[str], extras: dict[str, object]) -> bool:
    """An inline dataset list becomes a file that exists only in this process, so that nothing is written."""
    descriptor = create_memfd("datasets")
    os.write(descriptor, json.dumps(value).encode())
    cli_args.append(f"--data_backend_config=/proc/self/fd/{descriptor}")
    return True


def _legacy_handlers(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Blocks and older spellings from JSON and TOML, passed on as flags."""
    handlers = module._LEGACY_ARG_HANDLERS
    ours: dict[str, Handler] = {block: _block_handler(block) for block in TRAINING_BLOCKS}
    ours.update({key: _older_handler(key) for key in OLDER_KEYS})
    return [put(handlers, key, handler) for key, handler in {**ours, "datasets": _inline_datasets}.items()]


def _env_map(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Blocks from ``config.env``, as ``CACHE_CONFIG='{...}'`` and ``GH200_OPTIMIZATIONS='{...}'``."""
    return [put(module.env_to_args_map, block.upper(), f"--{block}") for block in TRAINING_BLOCKS]


def _loader_helpers(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """An explicit ``--config PATH`` in any format, and command-line flags that override the file."""
    launch = runtime.launch
    if launch.config_path is None and not launch.flags:
        return []

    def loader(original: Callable[[], Any]) -> Callable[[], list[str]]:
        def load() -> list[str]:
            if launch.config_path is None:
                arguments = list(original())
            elif launch.config_path.endswith(".env"):
                # Its own loader knows what each variable means, and reads them from the environment.
                os.environ.update(read_written(launch.config_path))
                arguments = list(original())
            else:
                arguments = module.json_file.normalize_args(read_training_config(launch.config_path))
            return [*arguments, *launch.flags]

        return load

    return [put(module.helpers, name, loader(module.helpers[name])) for name in ("json", "toml", "env")]


SEAMS = (
    Seam("config.legacy_handlers", _legacy_handlers),
    Seam("config.env_map", _env_map),
    Seam("config.loader_helpers", _loader_helpers),
)
