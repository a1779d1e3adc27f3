from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, missing


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every node has for itself, as /tmp is on most clusters."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="session")
def cluster(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (why := missing()) is not None:
        pytest.skip(why)
    started = Cluster(tmp_path_factory.mktemp("cluster") / "slurm", [scratch])
    yield started
    started.close()
