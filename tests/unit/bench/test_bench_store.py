"""The benchmark's parts give the promised keys, and their references do the work they are named after."""

from __future__ import annotations

import os
from pathlib import Path

import lz4.frame
import pytest

from simpletuner_gh200.bench.samples import jpeg_head, make_files
from simpletuner_gh200.bench.sharing import measure_dataset
from simpletuner_gh200.bench.suites.store import (
    measure_index,
    measure_reading,
    measure_staging,
    measure_walk,
    thread_lz4_dict,
)


def test_staging_prints_both_ways_to_verify(tmp_path: Path) -> None:
    found = measure_staging(tmp_path, 5000, 6, 1)
    assert {"gb_per_s", "vs_read_limit", "vs_thread_lz4_dict", "header"} <= found.keys()
    assert {"gb_per_s", "vs_read_limit", "vs_thread_lz4_dict"} <= found["header"].keys()


def test_walk_read_and_index_have_their_keys(tmp_path: Path) -> None:
    assert measure_walk(tmp_path / "walk", 20, 1)["vs_rglob"] > 0
    reading = measure_reading(tmp_path / "read", 5000, 6, 1)
    assert {"view_vs_local", "view_vs_memcpy", "bytes_vs_local"} <= reading.keys()
    assert measure_index(2000, 1)["bytes_per_key"] <= 80


def test_the_reference_holds_every_file_compressed(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 5000, 3)
    held = thread_lz4_dict(tmp_path)
    assert {str(path): lz4.frame.decompress(packed) for path, packed in held.items()} == {
        path: Path(path).read_bytes() for path in paths
    }


def test_made_images_open() -> None:
    import io

    from PIL import Image

    assert Image.open(io.BytesIO(jpeg_head() + b"noise")).size == (512, 512)


@pytest.mark.skipif(os.environ.get("GH200_SLOW_TESTS") != "1", reason="slow: set GH200_SLOW_TESTS=1")
def test_four_ranks_hold_one_copy(tmp_path: Path) -> None:
    found = measure_dataset(tmp_path, 2_000_000, 150)
    assert found["pss_ratio"] < 1.6, "300 MB once, and four interpreters"
