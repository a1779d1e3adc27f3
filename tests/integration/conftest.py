from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.workbench import Workbench

HERE = Path(__file__).parent


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


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.releases)
