"""The git client. Refs are data: they never reach git where it reads options."""

from __future__ import annotations

import subprocess
from pathlib import Path

from simpletuner_gh200.errors import UsageError


def git(repository: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    """One git command in ``repository``; what it writes to stderr becomes the error."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as missing:
        raise UsageError("git is not installed", remedy="install git") from missing
    if check and done.returncode != 0:
        detail = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise UsageError(f"git {arguments[0]} in {repository}: {detail}")
    return done


def resolve(repository: Path, ref: str) -> str:
    """The commit a ref names. ``--end-of-options`` keeps a ref that starts with a dash from being an option."""
    done = git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", check=False)
    commit = done.stdout.decode().strip()
    if done.returncode != 0 or not commit:
        raise UsageError(f"no commit {ref!r} in {repository}", remedy="fetch it first, or name a branch, tag or commit")
    return commit
