import pytest

from tests.unit.diagnostics.machine import Machine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(72)))
    return Machine(tmp_path)
