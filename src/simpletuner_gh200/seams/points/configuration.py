"""A configuration's way to SimpleTuner: our blocks go along, are fields like its own, and can be asked for afterwards.

SimpleTuner drops a block it does not know, reads a TOML file only from its own ``config`` folder, and ignores flags
whenever there is a file. Without a block of ours, ``--config`` or flags, its own loaders run untouched.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
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
from simpletuner_gh200.upstream.spec import seam

HIDDEN_TAB = "gh200"
"""No tab that anybody opens: what is there is a legal flag, and shown and found nowhere."""

_LABELS = {"cache_config": "GH200 caches", "gh200_optimizations": "GH200 optimizations"}

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
        earlier = [argument for argument in cli_args if argument.startswith(prefix)]
        collected = json.loads(earlier[0].removeprefix(prefix)) if earlier else {}
        cli_args[:] = [argument for argument in cli_args if argument not in earlier]
        cli_args.append(prefix + json.dumps({**collected, key: value}))
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
            if launch.config_path is not None and not launch.config_path.endswith(".env"):
                return [*module.json_file.normalize_args(read_training_config(launch.config_path)), *launch.flags]
            if launch.config_path is not None:
                # Its own loader knows what each variable means, and reads them from the environment.
                os.environ.update(read_written(launch.config_path))
            return [*original(), *launch.flags]

        return load

    return [put(module.helpers, name, loader(module.helpers[name])) for name in ("json", "toml", "env")]


def _fields(module: ModuleType) -> list[Any]:
    types = importlib.import_module(module.__name__.rpartition(".")[0] + ".types")
    as_json = getattr(types.FieldType, "TEXT_JSON", types.FieldType.TEXTAREA)

    def field(name: str, label: str, words: str, kind: Any, tab: str) -> Any:
        shown = {"ui_label": label, "help_text": words, "importance": types.ImportanceLevel.ADVANCED}
        made = {"name": name, "arg_name": f"--{name}", "field_type": kind, "default_value": None}
        return types.ConfigField(**made, **shown, tab=tab, section="gh200")

    older = "Older spellings found in the configuration; filled in by simpletuner-gh200."
    return [
        *(
            field(block, _LABELS[block], f"The {block} block, as JSON", as_json, "hardware")
            for block in TRAINING_BLOCKS
        ),
        field(LEGACY_FLAG, "GH200 older spellings", older, types.FieldType.TEXTAREA, HIDDEN_TAB),
    ]


def _add_field(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """SimpleTuner builds its argument parser, its terminal wizard and its Web UI from this registry.

    In the Web UI a field for every key stands in for the two blocks (``points/web_ui.py``).
    """
    registry = module.field_registry
    return [put(registry._fields, field.name, field) for field in _fields(module)]


def _accessors(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """Those that the earlier guides name on ``StateTracker``."""
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


def _alias(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """``simpletuner.gh200`` of the earlier guides as an attribute of its package, for whoever says just ``import``.

    The ``.pth`` line has put it into ``sys.modules``; a tree with a package of its own there has let go of it.
    """
    there = sys.modules.get("simpletuner.gh200")
    return [put(module, "gh200", there)] if there is not None and not hasattr(module, "gh200") else []


PACKAGE = seam(
    "simpletuner.gh200",
    module="simpletuner",
    place="__name__",
    need="the earlier guides import from simpletuner.gh200",
)

SEAMS = (
    Seam("config.legacy_handlers", _legacy_handlers),
    Seam("config.env_map", _env_map),
    Seam("config.loader_helpers", _loader_helpers),
    Seam("field_registry.add_field", _add_field),
    Seam("state_tracker.class", _accessors),
    Seam(PACKAGE.name, _alias, own_spec=PACKAGE),
)
