from __future__ import annotations

import pytest

from tests.integration.workbench import Forge, Workbench, clean_environment


@pytest.fixture(scope="session")
def forge():
    server = Forge(clean_environment())
    yield server
    server.close()


@pytest.fixture(scope="session")
def _prepared(forge, tmp_path_factory):
    bench = Workbench(forge, tmp_path_factory.mktemp("bench"))
    bench.prepare()
    return bench


@pytest.fixture
def workbench(_prepared):
    """The shared project, restored to its snapshot: filled caches, no output, plain configuration."""
    _prepared.restore()
    _prepared.configure()
    return _prepared


def pytest_collection_modifyitems(items):
    for item in items:
        if "integration" in str(item.path):
            item.add_marker(pytest.mark.real)
