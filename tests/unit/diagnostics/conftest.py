import pytest

from tests.unit.diagnostics.machine import Machine


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)
