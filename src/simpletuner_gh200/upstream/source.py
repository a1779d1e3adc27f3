"""Places a SimpleTuner can be read from: a folder, a wheel, a git commit. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import syntax

PACKAGE = "simpletuner"
MAX_SOURCE_BYTES = 16 << 20
"""More than this is no Python source of ours to read; guards against a wheel that inflates without end."""


Source = Callable[[str], bytes | None]
"""The text of a module by its dotted name; None if there is no such module."""


def candidate_paths(module: str) -> tuple[str, str]:
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


def folder_source(root: Path) -> Source:
    """A folder that holds packages, such as a checkout or ``site-packages``."""

    def read(module: str) -> bytes | None:
        path = next((path for name in candidate_paths(module) if (path := root / name).is_file()), None)
        return None if path is None else path.read_bytes()

    return read


def commit_source(repository: Path, commit: str) -> Source:
    """The tree of one commit."""

    def read(module: str) -> bytes | None:
        names = (f"{commit}:{path}" for path in candidate_paths(module))
        found = (git(repository, "cat-file", "blob", name, check=False) for name in names)
        return next((done.stdout for done in found if done.returncode == 0), None)

    return read


def wheel_source(path: Path) -> Source:
    """A wheel, read in place: members are looked up by exact name and never unpacked."""

    def read(module: str) -> bytes | None:
        archive = _archive(path)
        names = archive.NameToInfo
        member = next((names[name] for name in candidate_paths(module) if name in names), None)
        if member is not None and member.file_size > MAX_SOURCE_BYTES:
            raise UsageError(f"{path.name}: {member.filename} claims {member.file_size} bytes, which no source has")
        return None if member is None else archive.read(member)

    return read


@lru_cache(maxsize=2)
def _archive(path: Path) -> zipfile.ZipFile:
    """Kept open, because reading a wheel's table of contents costs more than reading a module."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as unreadable:
        raise UsageError(f"{path} is no readable wheel: {unreadable}", remedy="delete it and try again") from unreadable


@dataclass(frozen=True)
class JoinedSource:
    """One source per top-level package: accelerate is not part of a SimpleTuner wheel."""

    packages: Mapping[str, Source]
    known_version: str | None = None
    """What this SimpleTuner is called, where that is known without reading it."""

    def read(self, module: str) -> bytes | None:
        source = self.packages.get(module.partition(".")[0])
        return None if source is None else source(module)

    def has(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    @property
    def version(self) -> str:
        """As it is known, or as the package's own source says it."""
        if self.known_version is not None:
            return self.known_version
        value = syntax.value_of(syntax.find(ast.parse(self.read(PACKAGE) or b""), "__version__"))
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "unknown"


def installed_package(name: str) -> Source | None:
    """The package as this interpreter would import it; None if there is none."""
    package = find_package(name)
    return None if package is None else folder_source(package.parent)


def with_installed_accelerate(source: Source, version: str | None = None) -> JoinedSource:
    accelerate = installed_package("accelerate")
    others: dict[str, Source] = {} if accelerate is None else {"accelerate": accelerate}
    return JoinedSource({PACKAGE: source, **others}, version)


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
    for root in (path, path.parent):
        if (root / PACKAGE / "helpers").is_dir() and (root == path or path.name == PACKAGE):
            return with_installed_accelerate(folder_source(root))
    raise UsageError(
        f"no SimpleTuner in {path}", remedy="give a checkout, a site-packages folder, the package folder or a wheel"
    )


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
