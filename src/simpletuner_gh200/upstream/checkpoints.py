"""Which of SimpleTuner's checkpoints are whole: the one decision that preflight, ranks and closing lines share.

A checkpoint is whole when every rank has written everything. Newer releases put a guard file there last, after a
manifest of all files; what such a release left without one is not whole, whatever else is there. For older ones the
files themselves must do: the weights, and of every rank what it writes last. Each kind of file tells at its end or in
its header whether all of it is there. Nothing is loaded, moved or deleted here.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.upstream.source import installed_version

GUARD = ".guard"
MANIFEST = "checkpoint_manifest.json"
STATE = "training_state.json"
OURS = "gh200_state.json"
"""What we add. A run goes on without it, and says what it does not know then."""
GUARDED = Version("4.3.2")
"""The first release that writes a guard file."""
UNGUARDED = "0"
"""Any release before it."""

_NAME = re.compile(r"checkpoint-(\d+)(?:-(?!tmp$)\w+)?")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_PLACE = re.compile(r"training_state(?:-rank(\d+))?-(?!rank\d+\.json$).+\.json")
"""Where a rank is in one dataset: the very last that releases without a guard write."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
_NO_WEIGHTS = re.compile(r"(optimizer|scheduler|sampler|scaler|dl_state_dict|random_states|custom_checkpoint)[_.\d]")


def checkpoints(output: Path) -> list[Path]:
    """Of an output folder, oldest first, as SimpleTuner orders them."""
    folders = [path for path in output.iterdir() if path.is_dir()] if output.is_dir() else []
    found = [(int(name.group(1)), path) for path in folders if (name := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_whole(output: Path) -> Path | None:
    return next((path for path in reversed(checkpoints(output)) if flaw(path) is None), None)


def flaw(checkpoint: Path, release: str | None = None) -> str | None:
    """What is missing from a checkpoint that ``release`` wrote, the installed one if not said; None for a whole one."""
    try:
        next(checkpoint.iterdir(), None)  # raises where it can't be listed; rglob would find nothing there
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
        writer = release or _writer(checkpoint)
        guards = writer is not None and guarded(writer)
        state = checkpoint / STATE
        inside = STATE in sizes and b'"current_epoch"' in state.read_bytes()
        missing = missing_from(sizes, guards=guards, listed=_listed(checkpoint), places_inside=inside)
        return missing or next((broken for name in sizes if (broken := _flaw_of_file(checkpoint, name))), None)
    except OSError as unreadable:
        return f"it can't be read: {unreadable}"


def guarded(release: str) -> bool:
    try:
        return Version(release) >= GUARDED
    except InvalidVersion:  # a checkout's own version text: newer than any release
        return True


def missing_from(
    sizes: Mapping[str, int], *, guards: bool, listed: Collection[str] | None, places_inside: bool = False
) -> str | None:
    """What a checkpoint of these files lacks. Pure.

    ``guards``: a release wrote it that writes a guard file. ``listed``: what its manifest names, if it has one.
    ``places_inside``: its training state holds a dataset's place, as it does for a dataset named like a part of that
    file.
    """
    if not sizes:
        return "it is empty"
    if guards and GUARD not in sizes:
        return f"it has no {GUARD}, which SimpleTuner {GUARDED} and later write last"
    if listed:  # written when every rank was done
        lost = sorted(set(listed) - set(sizes))
        return f"it has no {lost[0]}, which its manifest names" if lost else None
    if not any(_is_weights(name) and size for name, size in sizes.items()):
        return "it has no weights"
    return _missing_of_ranks(sizes, places_inside=places_inside)


def _missing_of_ranks(names: Collection[str], *, places_inside: bool) -> str | None:
    """Ranks write their training state first, then their random states, and their places in the datasets last."""
    states = {0: STATE} | {rank: f"training_state-rank{rank}.json" for rank in range(1, _ranks(names))}
    placed = {int(place.group(1) or 0) for name in names if (place := _PLACE.fullmatch(name))}
    for rank, state in states.items():
        for needed in (state, f"random_states_{rank}.pkl"):
            if needed not in names:
                return f"it has no {needed}"
        if rank not in placed and not places_inside:
            return f"it has no {state.removesuffix('.json')}-*.json: where rank {rank} is in its datasets"
    return None


def _ranks(names: Collection[str]) -> int:
    """How many have left something."""
    found = (_RANDOM.fullmatch(name) or re.fullmatch(r"training_state-rank(\d+).*\.json", name) for name in names)
    return 1 + max((int(name.group(1)) for name in found if name), default=0)


def _is_weights(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _WEIGHTS and "ema" not in path.parts[:-1] and not _NO_WEIGHTS.match(name)


def _writer(checkpoint: Path) -> str | None:
    """The release installed, if it can have written it: what is older than the installation was left by another one.

    So was what comes after a whole checkpoint that has no guard: a release that guards leaves none such behind.
    """
    package = find_package("simpletuner")
    if package is None or checkpoint.stat().st_mtime < package.stat().st_mtime or _follows_unguarded(checkpoint):
        return None
    return installed_version("simpletuner")


def _follows_unguarded(checkpoint: Path) -> bool:
    siblings = checkpoints(checkpoint.parent)
    earlier = siblings[: siblings.index(checkpoint)] if checkpoint in siblings else []
    return any(not (path / GUARD).exists() and flaw(path, UNGUARDED) is None for path in earlier)


def _listed(checkpoint: Path) -> list[str] | None:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):  # a broken one is named among the files
        return None
    files = manifest.get("files") if isinstance(manifest, dict) else None
    return [str(name) for name in files if name != OURS] if isinstance(files, list) else None


def _flaw_of_file(checkpoint: Path, name: str) -> str | None:
    path = checkpoint / name
    try:
        broken = _LOOKS[path.suffix](path) if path.suffix in _LOOKS else None
    except OSError as unreadable:
        broken = str(unreadable)
    return f"{name} is not whole: {broken}" if broken is not None else None


def _flaw_of_json(path: Path) -> str | None:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as broken:
        return str(broken)
    return None


def _flaw_of_safetensors(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # compares its header with the file's length
            return None
    except SafetensorError as broken:
        return str(broken)


def _flaw_of_torch(path: Path) -> str | None:
    """torch writes zip files, whose directory comes last; what begins otherwise is not judged, but for being empty."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        return "it is empty"
    return "its end is missing" if start == b"PK" and not zipfile.is_zipfile(path) else None


_LOOKS = {
    ".json": _flaw_of_json,
    ".safetensors": _flaw_of_safetensors,
    **dict.fromkeys((".bin", ".pkl", ".pt", ".pth"), _flaw_of_torch),
}
