"""The option table of the installed SimpleTuner: from the user's cache, or made once in a child process.

Nothing here stops a run: where the table can't be had, there is a note that says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner_gh200.config.packages import find_package
from simpletuner_gh200.upstream import user_cache
from simpletuner_gh200.upstream.dataset_keys import FOLDERS
from simpletuner_gh200.upstream.option_table import OptionTable
from simpletuner_gh200.upstream.source import installed_version

SCHEMA = "4"
KIND = "options"
MAKER = (sys.executable, "-m", "simpletuner_gh200.seams.options")
"""What makes the table."""

PATIENCE_SECONDS = 300
"""A file system that takes longer to import SimpleTuner from has other problems than a misspelt key."""

_SOURCES = (
    "helpers/configuration/*.py",
    "helpers/models/*/model.py",
    "helpers/models/registry.py",
    "helpers/training/optimizer_param.py",
    *(f"helpers/{folder}/**/*.py" for folder in FOLDERS),
    "simpletuner_sdk/server/services/field_registry/**/*.py",
)


@dataclass(frozen=True)
class Reading:
    """The table, or None; and what a person should know about it."""

    table: OptionTable | None
    notes: tuple[str, ...] = ()


def installed_options(say: Callable[[str], None] = lambda _words: None) -> Reading:
    """The options of the SimpleTuner an import would find; ``say`` is told before it takes long."""
    package, version = find_package("simpletuner"), installed_version("simpletuner")
    if package is None or version is None:
        return Reading(None, ("SimpleTuner is not installed here, so its own options were not checked",))
    entry = _key(package, version)
    kept = _parsed(user_cache.load(KIND, entry))
    if kept is not None:
        return Reading(kept)
    say(f"reading the options of SimpleTuner {version}, once (it takes as long as importing it) ...")
    try:
        made = _make()
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        return Reading(None, (f"SimpleTuner's own options were not checked: {failure}",))
    refused = user_cache.store(KIND, entry, made.to_json())
    if refused is None:
        return Reading(made)
    note = f"SimpleTuner's options are read anew at every start, since they can't be kept: {refused}"
    return Reading(made, (f"{note} (name a folder you may write to in XDG_CACHE_HOME)",))


def _make() -> OptionTable:
    """In a folder of its own: SimpleTuner leaves files where it is imported. Raises ValueError with the reason."""
    with tempfile.TemporaryDirectory(prefix="gh200-options-") as folder:
        ended = subprocess.run(
            MAKER, cwd=folder, env=_environment(os.environ), capture_output=True, timeout=PATIENCE_SECONDS
        )
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise ValueError(f"reading them failed with exit code {ended.returncode}: {last[0]}")
    lines = ended.stdout.decode(errors="replace").strip().splitlines() or [""]
    try:
        table = _parsed(json.loads(lines[-1]))
    except json.JSONDecodeError:
        table = None
    if table is None:
        raise ValueError(f"reading them gave no table but {lines[-1][:80]!r}")
    return table


def _parsed(content: object) -> OptionTable | None:
    """None where the content is not a table of ours: torn, or of another version."""
    try:
        return OptionTable.from_json(content) if isinstance(content, Mapping) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """The child finds the same packages in the same order as we do, and no extension in SimpleTuner."""
    dropped = {"SIMPLETUNER_SKIP_TORCH", "PYTHONDONTWRITEBYTECODE"}  # without bytecode an import takes a minute more
    found = os.pathsep.join(dict.fromkeys(os.path.abspath(place) for place in sys.path))
    kept = {name: value for name, value in own.items() if name not in dropped}
    return {**kept, "SIMPLETUNER_GH200": "0", "PYTHONPATH": found}


def _key(package: Path, version: str) -> str:
    """What the table depends on: the release and where it is, its sources, what is installed, the kind of machine."""
    digest = hashlib.blake2b(digest_size=20)
    for part in (SCHEMA, version, package.absolute(), sys.version, platform.machine(), _has_gpu(), *_states(package)):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()


def _has_gpu() -> bool:
    """Some values are offered only where there is a GPU to use them on."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _states(package: Path) -> Iterator[tuple[str, int, int]]:
    """Sources by time and size, for checkouts whose version stays; the folder of packages, for what is added to it."""
    files = sorted(path for pattern in _SOURCES for path in package.glob(pattern))
    for path in (package.parent, *files):
        state = path.stat()
        yield path.name, state.st_mtime_ns, state.st_size if path.is_file() else 0
