"""Places a SimpleTuner can be read from: the installed one, a folder, a wheel, a git commit, a release on the index.

Nothing is imported. The index is asked through the user's own pip and its configuration; wheels are kept.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.user_cache import cache_root

PACKAGE = "simpletuner"
OLDEST = Version("3.1")
"""The first release line the contract is written for."""
MAX_SOURCE_BYTES = 16 << 20
"""More than this is no Python source of ours to read; guards against a wheel that inflates without end."""


Source = Callable[[str], bytes | None]
"""The text of a module by its dotted name; None if there is no such module."""


@dataclass(frozen=True)
class JoinedSource:
    """One source per top-level package: accelerate is not part of a SimpleTuner wheel."""

    packages: Mapping[str, Source]
    known_version: str | None = None
    """What this SimpleTuner is called, where that is known without reading it."""

    def read(self, module: str) -> bytes | None:
        return self.packages[module.partition(".")[0]](module) if self.has(module) else None

    def has(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    @property
    def version(self) -> str:
        """As it is known, or as the package's own source says it."""
        if self.known_version is not None:
            return self.known_version
        value = syntax.value_of(syntax.find(ast.parse(self.read(PACKAGE) or b""), "__version__"))
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "unknown"


def candidate_paths(module: str) -> tuple[str, str]:
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


def _by_module(read: Callable[[str], bytes | None]) -> Source:
    """``read`` gives the file of a path, or None."""
    return lambda module: next((text for path in candidate_paths(module) if (text := read(path)) is not None), None)


def folder_source(root: Path) -> Source:
    """A folder that holds packages, such as a checkout or ``site-packages``."""
    return _by_module(lambda name: path.read_bytes() if (path := root / name).is_file() else None)


def commit_source(repository: Path, commit: str) -> Source:
    """The tree of one commit."""

    def read(name: str) -> bytes | None:
        done = git(repository, "cat-file", "blob", f"{commit}:{name}", check=False)
        return done.stdout if done.returncode == 0 else None

    return _by_module(read)


def wheel_source(path: Path) -> Source:
    """A wheel, read in place: members are looked up by exact name and never unpacked."""

    def read(name: str) -> bytes | None:
        archive = _archive(path)
        member = archive.NameToInfo.get(name)
        if member is not None and member.file_size > MAX_SOURCE_BYTES:
            raise UsageError(f"{path.name}: {name} claims {member.file_size} bytes, which no source has")
        return None if member is None else archive.read(member)

    return _by_module(read)


@lru_cache(maxsize=2)
def _archive(path: Path) -> zipfile.ZipFile:
    """Kept open, because reading a wheel's table of contents costs more than reading a module."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as unreadable:
        raise UsageError(f"{path} is no readable wheel: {unreadable}", remedy="delete it and try again") from unreadable


def installed_package(name: str) -> Source | None:
    """The package as this interpreter would import it; None if there is none."""
    package = find_package(name)
    return None if package is None else folder_source(package.parent)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- which of them is meant ---------------------------------------------------------------------------------------


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
        try:
            return released(Version(version))
        except InvalidVersion as invalid:
            raise UsageError(f"{version!r} is no version", remedy="give one such as 4.10.1") from invalid
    if path is not None:
        return path_source(path)
    if repository is not None:
        return with_installed_accelerate(commit_source(repository, resolve(repository, ref or "HEAD")))
    return installed_source()


def installed_source() -> JoinedSource:
    source = installed_package(PACKAGE)
    if source is None:
        raise UsageError(
            "SimpleTuner is not installed in this Python",
            remedy="install it, or name what to check with --version, --path or --git",
        )
    return with_installed_accelerate(source, installed_version(PACKAGE))


def path_source(path: Path) -> JoinedSource:
    """A wheel file, a checkout or site-packages folder, or the package folder itself."""
    if path.is_file() and path.suffix == ".whl":
        return with_installed_accelerate(wheel_source(path))
    root = path.parent if path.name == PACKAGE and (path / "helpers").is_dir() else path
    if not (root / PACKAGE / "helpers").is_dir():
        remedy = "give a checkout, a site-packages folder, the package folder or a wheel"
        raise UsageError(f"no SimpleTuner in {path}", remedy=remedy)
    return with_installed_accelerate(folder_source(root))


def released(version: Version) -> JoinedSource:
    return with_installed_accelerate(wheel_source(wheel(version)), str(version))


def with_installed_accelerate(source: Source, version: str | None = None) -> JoinedSource:
    accelerate = installed_package("accelerate")
    return JoinedSource({PACKAGE: source, **({"accelerate": accelerate} if accelerate else {})}, version)


# -- the package index ----------------------------------------------------------------------------------------------


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
    kept = kept_wheel(folder, version)
    if kept is not None:
        return kept
    # Into a folder of its own first, so that an interrupted download never looks like a wheel.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--dest", scratch)
        _pip("download", *options, f"{PACKAGE}=={version}")
        path = kept_wheel(Path(scratch), version)
        if path is None:
            raise UsageError(f"pip fetched no wheel of {PACKAGE} {version}")
        return path.rename(folder / path.name)


def kept_wheel(folder: Path, version: Version) -> Path | None:
    for path in sorted(folder.glob("*.whl")):
        try:
            found = parse_wheel_filename(path.name)[:2]
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if found == (PACKAGE, version):
            return path
    return None


def _pip(*arguments: str) -> str:
    done = subprocess.run([*_pip_command(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"`pip {' '.join(arguments[:2])}` failed: {_last_error(done.stderr)}",
            remedy="check the version, the network and pip's configuration",
        )
    return done.stdout


def _pip_command() -> tuple[str, ...]:
    if importlib.util.find_spec("pip") is not None:
        return sys.executable, "-m", "pip"
    for program, *arguments in (("pip",), ("pip3",), ("uv", "tool", "run", "pip")):
        if found := shutil.which(program):
            return found, *arguments
    raise UsageError("no pip to ask the package index with", remedy="install pip or uv")


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()[-1:]
    # An index address may carry a user name and a token.
    return re.sub(r"://[^/@\s]+@", "://[redacted]@", " ".join(lines)) or "no reason given"


# -- the git client. Refs are data: they never reach git where it reads options -----------------------------------


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
