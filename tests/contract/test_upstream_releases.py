"""The support table's data against the releases themselves: the installed one, and those whose wheels are kept."""

from __future__ import annotations

import pytest
from packaging.version import Version

from scripts.dev.releases import known_releases, off_on
from simpletuner_gh200.upstream.check import check_installed, check_remembered
from simpletuner_gh200.upstream.source import kept_wheel, released
from simpletuner_gh200.upstream.user_cache import cache_root

pytestmark = pytest.mark.releases

KNOWN = known_releases()
# All of them are a gigabyte: `gh200 upstream check --all` fetches them, and then they are looked at here too.
KEPT = [version for version in KNOWN if kept_wheel(cache_root() / "wheels", Version(version))]


def test_the_table_says_what_the_check_finds_in_the_installed_release() -> None:
    found = check_installed()
    assert off_on(found) == KNOWN[found.version]


@pytest.mark.matrix
def test_the_table_says_what_the_check_finds_in_every_wheel_that_is_here() -> None:
    found = [off_on(check_remembered(released(Version(version)))) for version in KEPT]
    assert found == [KNOWN[version] for version in KEPT]
