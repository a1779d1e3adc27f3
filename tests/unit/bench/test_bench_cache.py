"""The benchmark's parts run and give what the contract names."""

from __future__ import annotations

from simpletuner_gh200.bench.suites.cache import measure_memory, measure_warm_start


def test_batches_and_hits(tmp_path):
    batch, hit = measure_memory(tmp_path / "32KB", "32KB", 32, 1)
    assert {"vs_torch_load", "vs_memcpy"} <= batch.keys()
    assert {"us", "vs_memcpy"} <= hit.keys()
    assert all(value > 0 for value in (*batch.values(), *hit.values()))


def test_warm_start(tmp_path):
    found = measure_warm_start(tmp_path, 4, 1)
    assert {"vs_read_limit", "vs_pt_files"} <= found.keys()
    assert all(value > 0 for value in found.values())
