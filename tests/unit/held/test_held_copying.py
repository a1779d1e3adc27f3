"""Copies spread over threads are the copies that were asked for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from simpletuner_gh200.held import buffers as copying


@pytest.mark.parametrize("limit", [1, 1 << 30], ids=["threads", "one thread"])
def test_all_bytes_arrive(monkeypatch, limit):
    monkeypatch.setattr(copying, "PARALLEL_FROM", limit)
    monkeypatch.setattr(copying, "_cores", lambda: 4)
    monkeypatch.setattr(copying, "PIECE", 1000)
    source = np.random.default_rng(1).integers(0, 255, 100_003, np.uint8)
    target = np.zeros_like(source)
    rows, size = 7, len(source) // 7
    sources = [source.ctypes.data + row * size for row in reversed(range(rows))]
    copying.copy_rows(copying.address_of(target), sources, size)
    expected = np.concatenate([source[row * size : (row + 1) * size] for row in reversed(range(rows))])
    assert (target[: rows * size] == expected).all()


def test_helpers_that_never_get_to_it_are_not_waited_for(monkeypatch):
    """On a busy machine a helper may get a core long after the copy could have been done without it."""
    monkeypatch.setattr(copying, "PARALLEL_FROM", 1)
    monkeypatch.setattr(copying, "_cores", lambda: 4)
    source = np.random.default_rng(1).integers(0, 255, 1 << 20, np.uint8)
    target = np.zeros_like(source)
    go_on = threading.Event()
    busy = [copying._helpers().submit(go_on.wait) for _ in range(copying.MOST_THREADS)]
    try:
        copy = threading.Thread(target=copying.copy_rows, args=(target.ctypes.data, [source.ctypes.data], 1 << 20))
        copy.start()
        copy.join(30)
        assert not copy.is_alive() and (target == source).all()
    finally:
        go_on.set()
    assert all(one.result() for one in busy)
