"""Which of SimpleTuner's checkpoints are whole, and from which one a run can go on.

A checkpoint is whole when everything was written: newer releases put a guard file there last, after a manifest; older
ones leave no such sign, so the files themselves are looked at. Each kind tells at its end or in its header whether all
of it is there. Nothing is loaded, and nothing is deleted.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from simpletuner_gh200.errors import UsageError

GUARD = ".guard"
MANIFEST = "checkpoint_manifest.json"
STATE = "training_state.json"
LAST_WRITTEN = "random_states_*.pkl"
"""accelerate's last file of a rank."""

PLACES_KEPT = Version("4.9.3")
"""The first release in which every rank of a data-parallel run saves its place in the dataset and its randomness."""
PLACES_FOUND = Version("4.5.2")
"""Where all ranks had to save before (FSDP, DeepSpeed), the first in which each finds its own again."""

_NAME = re.compile(r"checkpoint-(\d+)(?:-(?!tmp$)\w+)?")


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on, and what is to be said about it."""

    flags: tuple[str, ...] = ()
    """To be added to SimpleTuner's."""
    notice: str | None = None


def checkpoints(output: Path) -> list[Path]:
    """Of an output folder, oldest first, as SimpleTuner orders them."""
    found = [(int(name.group(1)), path) for path in _folders(output) if (name := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _folders(output: Path) -> list[Path]:
    return [path for path in output.iterdir() if path.is_dir()] if output.is_dir() else []


def newest_whole(output: Path) -> Path | None:
    return next((path for path in reversed(checkpoints(output)) if flaw(path) is None), None)


def flaw(checkpoint: Path) -> str | None:
    """What is missing from a checkpoint; None for a whole one."""
    try:
        return _flaw(checkpoint)
    except OSError as unreadable:
        return f"it can't be read: {unreadable}"


def _flaw(checkpoint: Path) -> str | None:
    if not any(checkpoint.iterdir()):
        return "it is empty"
    guarded = (checkpoint / GUARD).is_file()
    if not guarded and ((checkpoint / MANIFEST).exists() or _siblings_are_guarded(checkpoint)):
        return f"it has no {GUARD}, which SimpleTuner writes last"
    if not (checkpoint / STATE).is_file():
        return f"it has no {STATE}"
    if not any(checkpoint.glob(LAST_WRITTEN)):
        return f"it has no {LAST_WRITTEN}, which accelerate writes last"
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and (broken := _flaw_of_file(path)) is not None:
            return f"{path.relative_to(checkpoint)} is not whole: {broken}"
    return None


def _siblings_are_guarded(checkpoint: Path) -> bool:
    """Then this one was written by a release that guards, too, unless it is older than those."""
    step = _step(checkpoint)
    return any((other / GUARD).is_file() for other in checkpoints(checkpoint.parent) if _step(other) < step)


def _step(checkpoint: Path) -> int:
    name = _NAME.fullmatch(checkpoint.name)
    return int(name.group(1)) if name else -1


def _flaw_of_file(path: Path) -> str | None:
    look = _LOOKS.get(path.suffix)
    try:
        return look(path) if look is not None else None
    except OSError as unreadable:
        return str(unreadable)


def _flaw_of_json(path: Path) -> str | None:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as broken:
        return str(broken)
    return None


def _flaw_of_safetensors(path: Path) -> str | None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 0 < length <= size - 8:
            return "its header is cut off"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            end = max(map(int, ends), default=0)
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as broken:
            return f"its header is none of a safetensors file: {broken}"
    return None if 8 + length + end == size else f"{size} bytes where its header says {8 + length + end}"


def _flaw_of_torch(path: Path) -> str | None:
    """torch writes zip files, whose directory comes last; what begins otherwise is not judged, but for being empty."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        return "it is empty"
    return "its end is missing" if start == b"PK" and not zipfile.is_zipfile(path) else None


_LOOKS = {".json": _flaw_of_json, ".safetensors": _flaw_of_safetensors, ".bin": _flaw_of_torch, ".pkl": _flaw_of_torch}


def resumption(config: Mapping[str, Any]) -> Resumption:
    """From which checkpoint a run of ``config`` is to go on. Raises for one that was named and is not whole."""
    asked, output = str(config.get("resume_from_checkpoint") or ""), config.get("output_dir")
    if not asked or not output or config.get("delete_invalid_checkpoints"):
        return Resumption()  # SimpleTuner then deletes and goes back by itself, as it was told to
    folder = Path(str(output))
    if asked != "latest":
        _refuse_if_broken(folder, asked)
        return Resumption()
    newest = next(iter(reversed(checkpoints(folder))), None)
    missing = flaw(newest) if newest is not None else None
    if newest is None or missing is None:
        return Resumption()
    whole = newest_whole(folder)
    left = f"{newest} is incomplete: {missing}. It is left as it is; "
    if whole is None:
        return Resumption(("--resume_from_checkpoint=",), left + "there is no whole one, so this run starts anew")
    return Resumption((f"--resume_from_checkpoint={whole.name}",), left + f"this run resumes from {whole.name}")


def forgotten_positions(config: Mapping[str, Any], release: str) -> str | None:
    """What to say before several ranks resume with a release that keeps the place of the first one alone.

    In older ones only the first rank of a data-parallel run saves anything; under FSDP and DeepSpeed all do, but look
    for it under another name. The others then begin their epoch anew with other random numbers, so that ranks count
    epochs differently, and one that has had all of its epochs leaves the others waiting.
    """
    asked, output, ranks = (config.get(key) for key in ("resume_from_checkpoint", "output_dir", "num_processes"))
    several = str(ranks or 1).isdecimal() and int(str(ranks or 1)) > 1
    if not (asked and output and several) or config.get("ignore_final_epochs") or not checkpoints(Path(str(output))):
        return None
    mended = PLACES_FOUND if config.get("fsdp_enable") or config.get("deepspeed_config") else PLACES_KEPT
    try:
        if Version(release) >= mended:
            return None
    except InvalidVersion:  # a checkout's own version text
        return None
    return (
        f"SimpleTuner {release} forgets where ranks after the first were in the dataset: after a resume in the middle "
        f"of an epoch they may wait for each other for ever. Use {mended} or later, or set ignore_final_epochs"
    )


def _refuse_if_broken(output: Path, asked: str) -> None:
    named = output / Path(asked.rstrip("/")).name  # as SimpleTuner finds it
    missing = flaw(named) if named.is_dir() else None
    if missing is not None:
        whole = newest_whole(output)
        instead = f"resume from {whole.name}, the last whole one" if whole is not None else "start anew without it"
        raise UsageError(f"resume_from_checkpoint: {named} is incomplete: {missing}", remedy=instead)
