"""The one forge of a pytest session, for every folder of tests that trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.workbench import Forge, clean_environment


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    server = Forge(clean_environment())
    yield server
    server.close()
