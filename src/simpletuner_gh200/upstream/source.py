"""Places a SimpleTuner can be read from: a folder, a wheel, a git commit. Nothing is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.git import git

PACKAGE = "simpletuner"
MAX_SOURCE_BYTES = 16 << 20
"""More than this is no Python source of ours to read; guards against a wheel that inflates without end."""


class Source(Protocol):
    """Something that has the text of modules, by dotted name."""

    def read(self, module: str) -> bytes | None:
        """The module's source; None if it has no such module."""


def candidate_paths(module: str) -> tuple[str, str]:
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


@dataclass(frozen=True)
class FolderSource:
    """A folder that holds packages, such as a checkout or ``site-packages``."""

    root: Path

    def read(self, module: str) -> bytes | None:
        for path in candidate_paths(module):
            try:
                return (self.root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
        return None


@dataclass(frozen=True)
class GitSource:
    """The tree of one commit."""

    repository: Path
    commit: str

    def read(self, module: str) -> bytes | None:
        found = (
            git(self.repository, "cat-file", "blob", f"{self.commit}:{path}", check=False)
            for path in candidate_paths(module)
        )
        return next((done.stdout for done in found if done.returncode == 0), None)


@dataclass(frozen=True)
class WheelSource:
    """A wheel, read in place: members are looked up by exact name and never unpacked."""

    path: Path

    def read(self, module: str) -> bytes | None:
        archive = _archive(self.path)
        for name in candidate_paths(module):
            try:
                member = archive.getinfo(name)
            except KeyError:
                continue
            if member.file_size > MAX_SOURCE_BYTES:
                raise UsageError(f"{self.path.name}: {name} claims {member.file_size} bytes, which no source has")
            return archive.read(member)
        return None


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
        return None if source is None else source.read(module)

    def has(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    @property
    def version(self) -> str:
        """As it is known, or as the package's own source says it."""
        if self.known_version is not None:
            return self.known_version
        value = syntax.value_of(syntax.find(ast.parse(self.read(PACKAGE) or b""), "__version__"))
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "unknown"


def installed_package(name: str) -> FolderSource | None:
    """The package as this interpreter would import it, editable installs included; None if there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    return FolderSource(Path(found.origin).parent.parent)


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
        return with_installed_accelerate(WheelSource(path))
    for root in (path, path.parent):
        if (root / PACKAGE / "helpers").is_dir() and (root == path or path.name == PACKAGE):
            return with_installed_accelerate(FolderSource(root))
    raise UsageError(
        f"no SimpleTuner in {path}", remedy="give a checkout, a site-packages folder, the package folder or a wheel"
    )


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
