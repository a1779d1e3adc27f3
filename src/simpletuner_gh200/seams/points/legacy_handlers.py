"""Seam 2a: pass our blocks on from JSON and TOML as flags; without it SimpleTuner drops an unknown block."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from types import ModuleType

from simpletuner_gh200.config.legacy import LEGACY_FLAG, OLDER_KEYS
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.seams.patch import AnyPatch, EntryPatch
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
    descriptor = os.memfd_create("gh200-datasets")
    os.write(descriptor, json.dumps(value).encode())
    cli_args.append(f"--data_backend_config=/proc/self/fd/{descriptor}")
    return True


def _patches(module: ModuleType, runtime: Runtime) -> Sequence[AnyPatch]:
    handlers = module._LEGACY_ARG_HANDLERS
    patches: list[AnyPatch] = [EntryPatch(handlers, block, _block_handler(block)) for block in TRAINING_BLOCKS]
    patches += [EntryPatch(handlers, key, _older_handler(key)) for key in OLDER_KEYS]
    patches.append(EntryPatch(handlers, "datasets", _inline_datasets))
    return patches


SEAM = Seam("config.legacy_handlers", _patches)
