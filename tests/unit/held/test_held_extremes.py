"""Very large files, very many files: `make test` asks for them in one environment (GH200_SLOW_TESTS=1)."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.held.codecs import CHUNK_BYTES, codec
from simpletuner_gh200.held.files import CHUNK_ENTRY
from simpletuner_gh200.held.segment import PLAIN
from simpletuner_gh200.held.staging import stage
from simpletuner_gh200.units import GIB, MIB
from tests.unit.held.held_samples import roomy, staged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("GH200_SLOW_TESTS") != "1", reason="slow: set GH200_SLOW_TESTS=1"),
]


@pytest.mark.one_release("4.")
def test_a_file_over_4_gib_is_held_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.truncate(4 * GIB + 12345)
        file.seek(4 * GIB + 12340)
        file.write(b"lasts")
    dataset, report = staged(tmp_path, compression="lz4", verify="none")
    assert report.size == 4 * GIB + 12345
    assert report.held < 32 * MIB
    segment, row = dataset._find(path)
    table = np.frombuffer(segment.data[segment.offset[row] :][: segment.length[row]], CHUNK_ENTRY)
    assert len(table) == 4 * GIB // CHUNK_BYTES + 1
    offset, size = table[-1]
    last = codec("lz4").decompress(segment.data[int(offset) : int(offset + size)], 12345)
    assert last == bytes(12340) + b"lasts"


@pytest.mark.parametrize("count", [62_500, pytest.param(1_000_000, marks=pytest.mark.matrix)])
def test_very_many_tiny_files_need_little_memory_besides(tmp_path: Path, count: int) -> None:
    """Names of a hundred files, which are as good as a million to whoever reads them, and quicker to make."""
    folders = 100
    for number in range(folders):
        folder = tmp_path / f"{number:03d}"
        folder.mkdir()
        (folder / "first.txt").write_bytes(b"caption %d" % number)
        at = os.open(folder, os.O_RDONLY)
        for other in range(1, count // folders):
            os.link("first.txt", f"{other:06d}.txt", src_dir_fd=at, dst_dir_fd=at)
        os.close(at)
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        segment, report = stage(tmp_path, InMemorySettings(num_workers=2), give_back=False, host=roomy)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        besides = grown - PLAIN.itemsize * count  # what every rank shares
        fine = report.staged == len(segment) == count and besides < 28 * MIB + 256 * count
        print(f"{besides / MIB:.0f} MiB besides, {report.line()}")
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shutil.rmtree(tmp_path)
