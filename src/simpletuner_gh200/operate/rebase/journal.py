"""What was done so far, in one file inside the git folder, written whole or not at all after every step."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simpletuner_gh200.errors import UsageError

SCHEMA = 3
FILE = "journal.json"


@dataclass
class StepRecord:
    """``status``: pending, started, done, failed, skipped. A step found started was interrupted."""

    name: str
    status: str = "pending"
    result: str = ""
    at: str = ""


@dataclass
class Journal:
    """Everything a later process needs to go on, to report, or to go back."""

    stamp: str
    original_branch: str | None
    """None where HEAD was detached."""
    original_commit: str
    onto_ref: str
    onto_commit: str
    remote: str | None
    skip_tests: bool
    steps: list[StepRecord]
    fork: dict[str, Any] = field(default_factory=dict)
    uncommitted: list[str] = field(default_factory=list)
    """Files with changes that were not committed when it started; the changes are in a patch."""
    schema: int = SCHEMA

    @property
    def backup_branch(self) -> str:
        return f"gh200-backup-{self.stamp}"

    @property
    def finished(self) -> bool:
        return all(step.status in ("done", "skipped") for step in self.steps)

    def next_step(self) -> StepRecord | None:
        return next((step for step in self.steps if step.status not in ("done", "skipped")), None)

    def step(self, name: str) -> StepRecord:
        return next(step for step in self.steps if step.name == name)


def save(folder: Path, journal: Journal) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, json.dumps(asdict(journal), indent=1))


def load(folder: Path) -> Journal | None:
    """The journal of the rebase under way, or None."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as damaged:
        raise UsageError(
            f"{folder / FILE} is damaged: {damaged}", remedy="go back with ROLLBACK.sh, or delete it"
        ) from damaged
    if data.get("schema") != SCHEMA:
        raise of_another_version(folder)
    steps = [StepRecord(**step) for step in data.pop("steps")]
    return Journal(steps=steps, **data)


def of_another_version(folder: Path) -> UsageError:
    return UsageError(f"{folder / FILE} is of another version of this command", remedy="finish with that version")


def archive(folder: Path, journal: Journal) -> None:
    """Out of the way of the next rebase, but kept."""
    os.replace(folder / FILE, folder / f"journal-{journal.stamp}.json")


def write_whole(path: Path, content: str | bytes, *, executable: bool = False) -> None:
    """A reader sees the old file or the new one, also after a power cut."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o755 if executable else 0o644)
    os.replace(name, path)
