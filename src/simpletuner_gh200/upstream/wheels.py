"""SimpleTuner's releases on the package index, through the user's own pip and its configuration; wheels are kept."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.source import PACKAGE, WheelSource
from simpletuner_gh200.upstream.user_cache import cache_root

OLDEST = Version("3.1")
"""The first release line the contract is written for."""


def parse_version(text: str) -> Version:
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


def wheel(version: Version) -> WheelSource:
    """That release's wheel, from our cache or the index. Its own Python requirement does not matter for reading it."""
    folder = cache_root() / "wheels"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = _kept(folder, version) or _download(folder, version)
    return WheelSource(path, f"{PACKAGE} {version}")


def _kept(folder: Path, version: Version) -> Path | None:
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
        path = _kept(Path(scratch), version)
        if path is None:
            raise UsageError(f"pip fetched no wheel of {PACKAGE} {version}")
        return path.rename(folder / path.name)


def _pip(*arguments: str) -> str:
    command = [*_pip_command(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"`pip {' '.join(arguments[:2])}` failed: {_last_error(done.stderr)}",
            remedy="check the version, the network and pip's configuration",
        )
    return done.stdout


def _pip_command() -> Sequence[str]:
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    for name in ("pip", "pip3"):
        found = shutil.which(name)
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
