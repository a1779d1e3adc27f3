"""Which SimpleTuner a command means: the installed one, a folder, a commit, or releases on the package index.

The index is asked through the user's own pip and its configuration; wheels are kept.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.check import Verdict, check_remembered
from simpletuner_gh200.upstream.source import (
    PACKAGE,
    JoinedSource,
    commit_source,
    installed_source,
    path_source,
    resolve,
    wheel_source,
    with_installed_accelerate,
)
from simpletuner_gh200.upstream.user_cache import cache_root

OLDEST = Version("3.1")
"""The first release line the contract is written for."""


def select(
    *, version: str | None = None, path: Path | None = None, repository: Path | None = None, ref: str | None = None
) -> JoinedSource:
    """At most one of version, path and repository; none of them means the installed one."""
    given = [name for name, value in (("--version", version), ("--path", path), ("--git", repository)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} name different things", remedy="give one of them")
    if ref is not None and repository is None:
        raise UsageError(f"--ref {ref} needs a repository", remedy="add --git DIR")
    if version is not None:
        return released(_parse_version(version))
    if path is not None:
        return path_source(path)
    if repository is not None:
        return with_installed_accelerate(commit_source(repository, resolve(repository, ref or "HEAD")))
    return installed_source()


def parse_operand(text: str) -> JoinedSource:
    """A release number, a path that exists, or ``DIR@REF`` for a commit: the operands of a comparison."""
    path = Path(text)
    if path.exists():
        return select(path=path)
    folder, at, ref = text.rpartition("@")
    if at and Path(folder).is_dir():
        return select(repository=Path(folder), ref=ref)
    return select(version=text)


def sweep() -> Iterator[Verdict]:
    """One verdict after the other, oldest release first."""
    return (check_remembered(released(version)) for version in releases())


def released(version: Version) -> JoinedSource:
    return with_installed_accelerate(wheel_source(wheel(version)), str(version))


def _parse_version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as invalid:
        raise UsageError(f"{text!r} is no version", remedy="give one such as 4.10.1") from invalid


def releases() -> list[Version]:
    """Every release on the index from the oldest supported on, oldest first."""
    listing = _pip("index", "versions", "--ignore-requires-python", PACKAGE)
    found = re.search(r"^Available versions: (.+)$", listing, flags=re.MULTILINE)
    if found is None:
        raise UsageError(f"pip lists no versions of {PACKAGE}", remedy="update pip; it needs `pip index versions`")
    return sorted(version for version in map(Version, found.group(1).split(", ")) if version >= OLDEST)


def wheel(version: Version) -> Path:
    """That release's wheel, from our cache or the index. Its own Python requirement does not matter for reading it."""
    folder = cache_root() / "wheels"
    folder.mkdir(mode=0o700, exist_ok=True)
    return kept_wheel(folder, version) or _download(folder, version)


def kept_wheel(folder: Path, version: Version) -> Path | None:
    for path in sorted(folder.glob("*.whl")):
        try:
            name, found, _build, _tags = parse_wheel_filename(path.name)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if name == PACKAGE and found == version:
            return path
    return None


def _download(folder: Path, version: Version) -> Path:
    """Into a folder of its own first, so that an interrupted download never looks like a wheel."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--dest", scratch)
        _pip("download", *options, f"{PACKAGE}=={version}")
        path = kept_wheel(Path(scratch), version)
        if path is None:
            raise UsageError(f"pip fetched no wheel of {PACKAGE} {version}")
        return path.rename(folder / path.name)


def _pip(*arguments: str) -> str:
    done = subprocess.run([*_pip_command(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"`pip {' '.join(arguments[:2])}` failed: {_last_error(done.stderr)}",
            remedy="check the version, the network and pip's configuration",
        )
    return done.stdout


def _pip_command() -> Sequence[str]:
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    found = shutil.which("pip") or shutil.which("pip3")
    if found is not None:
        return (found,)
    uv = shutil.which("uv")
    if uv is not None:
        return (uv, "tool", "run", "pip")
    raise UsageError("no pip to ask the package index with", remedy="install pip or uv")


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()[-1:]
    # An index address may carry a user name and a token.
    return re.sub(r"://[^/@\s]+@", "://[redacted]@", " ".join(lines)) or "no reason given"
