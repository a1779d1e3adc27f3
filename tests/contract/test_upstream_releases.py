"""The support table's data against the releases themselves, as far as their wheels are in the cache."""

from __future__ import annotations

import pytest
from packaging.version import Version

from simpletuner_gh200.upstream import support, wheels
from simpletuner_gh200.upstream.select import check_release
from simpletuner_gh200.upstream.verdict_cache import cache_root

KEPT = [
    release for release in support.known_releases() if wheels._kept(cache_root() / "wheels", Version(release.version))
]
pytestmark = pytest.mark.skipif(not KEPT, reason="no wheel in the cache; `gh200 upstream check --all` fetches them")


@pytest.mark.parametrize("release", KEPT, ids=lambda release: release.version)
def test_the_table_says_what_the_check_finds(release: support.Release) -> None:
    assert support.release_of(check_release(Version(release.version))) == release
