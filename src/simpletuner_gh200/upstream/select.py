"""Which SimpleTuner a command means: the installed one, a release, a folder, a commit, or every release there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream import wheels
from simpletuner_gh200.upstream.check import Verdict, check_remembered
from simpletuner_gh200.upstream.git import git_source
from simpletuner_gh200.upstream.source import (
    JoinedSource,
    installed_source,
    installed_version,
    path_source,
    with_installed_accelerate,
)


@dataclass(frozen=True)
class Selected:
    """A source to check, and the version it is called by if that is known without reading it."""

    source: JoinedSource
    version: str | None


def select(
    *, version: str | None = None, path: Path | None = None, repository: Path | None = None, ref: str | None = None
) -> Selected:
    """At most one of version, path and repository; none of them means the installed one."""
    given = [name for name, value in (("--version", version), ("--path", path), ("--git", repository)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} name different things", remedy="give one of them")
    if ref is not None and repository is None:
        raise UsageError(f"--ref {ref} needs a repository", remedy="add --git DIR")
    if version is not None:
        wanted = wheels.parse_version(version)
        return Selected(with_installed_accelerate(wheels.wheel(wanted)), str(wanted))
    if path is not None:
        return Selected(path_source(path), None)
    if repository is not None:
        return Selected(with_installed_accelerate(git_source(repository, ref or "HEAD")), None)
    return Selected(installed_source(), installed_version("simpletuner"))


def parse_operand(text: str) -> Selected:
    """A release number, a path that exists, or ``DIR@REF`` for a commit: the operands of a comparison."""
    path = Path(text)
    if path.exists():
        return select(path=path)
    folder, at, ref = text.rpartition("@")
    if at and Path(folder).is_dir():
        return select(repository=Path(folder), ref=ref)
    return select(version=text)


def check_release(version: Version) -> Verdict:
    return check_remembered(with_installed_accelerate(wheels.wheel(version)), version=str(version))


def sweep() -> Iterator[Verdict]:
    """One verdict after the other, oldest release first."""
    return (check_release(version) for version in wheels.releases())
