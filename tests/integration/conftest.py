from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from workbench import Forge, Workbench


def clean_environment() -> dict[str, str]:
    """One thread, so that sums are repeatable; bytecode on, or every import compiles SimpleTuner anew."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}


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
