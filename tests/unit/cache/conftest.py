from __future__ import annotations

import pytest
import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.table import Table


@pytest.fixture
def table():
    made = Table("test", Control.create(64, label="test", shared=False), look_for_nan=True)
    yield made
    made.close()


@pytest.fixture
def saved(tmp_path):
    """Write a value as SimpleTuner would; returns the path as text."""

    def save(value, name="entry.pt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        return str(path)

    return save


@pytest.fixture
def held(table, saved):
    """Write a value and take it into the table."""

    def hold(value, name="entry.pt"):
        path = saved(value, name)
        assert take_in(table, path), table.statistics.fallbacks
        return path

    return hold
