"""Tests of lifetimes collect garbage; frozen, torch's own objects are not gone through each time."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    gc.freeze()
