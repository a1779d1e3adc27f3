"""The contract against every release on the index."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from simpletuner_gh200.upstream import wheels
from simpletuner_gh200.upstream.check import check_remembered
from simpletuner_gh200.upstream.source import with_installed_accelerate
from simpletuner_gh200.upstream.verdict import Verdict


def check_release(version: Version) -> Verdict:
    return check_remembered(with_installed_accelerate(wheels.wheel(version)), version=str(version))


def sweep() -> Iterator[Verdict]:
    """One verdict after the other, oldest release first."""
    return (check_release(version) for version in wheels.releases())
