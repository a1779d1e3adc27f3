"""Very large files, very many files: minutes long, so only where GH200_SLOW_TESTS=1 asks for them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from store_samples import roomy, staged

from simpletuner_gh200.store.codecs import CHUNK_BYTES
from simpletuner_gh200.store.index import CHUNK_ENTRY
from simpletuner_gh200.store.staging import StagingRequest, stage
from simpletuner_gh200.units import GIB, MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("GH200_SLOW_TESTS") != "1", reason="slow: set GH200_SLOW_TESTS=1"),
]


def test_a_file_over_4_gib_is_held_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.truncate(4 * GIB + 12345)
        file.seek(4 * GIB + 12340)
        file.write(b"lasts")
    dataset, report = staged(tmp_path, compression="lz4", verify="none")
    assert report.size == 4 * GIB + 12345
    assert report.held < 32 * MIB
    row = dataset._find(path)
    rows = dataset._rows
    stored = dataset._data[rows.offset[row] : rows.offset[row] + rows.stored[row]]
    table = np.frombuffer(stored, CHUNK_ENTRY)
    assert len(table) == 4 * GIB // CHUNK_BYTES + 1
    from simpletuner_gh200.store.codecs import codec

    offset, size = table[-1]
    last = codec("lz4").decompress(dataset._data[int(offset) : int(offset + size)], 12345)
    assert last == bytes(12340) + b"lasts"


def test_a_million_tiny_files_need_little_memory_besides(tmp_path: Path) -> None:
    count = 1_000_000
    for folder in range(100):
        (tmp_path / f"{folder:03d}").mkdir()
        for number in range(count // 100):
            fd = os.open(tmp_path / f"{folder:03d}" / f"{number:06d}.txt", os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"caption %d" % number)
            os.close(fd)
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory, report = stage(StagingRequest(tmp_path, workers=2), host=roomy)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        index = os.fstat(memory.index).st_size
        fine = report.staged == count and grown - index < 256 * MIB and index / count < 80
        print(f"{grown / MIB:.0f} MiB besides, index {index / count:.0f} B/file, {report.line()}")
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
