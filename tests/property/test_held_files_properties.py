"""Whatever the files are called and hold: what is staged comes back, whole, under every codec."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.config.blocks import InMemorySettings
from simpletuner_gh200.held.files import HeldFiles
from simpletuner_gh200.held.listing import is_bookkeeping
from simpletuner_gh200.held.staging import stage
from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.units import GIB

NAMES = st.binary(min_size=1, max_size=40).filter(
    lambda name: not {0, ord("/")} & set(name) and name not in (b".", b"..") and not is_bookkeeping(name)
)
CONTENTS = st.one_of(st.binary(max_size=200), st.builds(bytes.__mul__, st.binary(max_size=9), st.integers(0, 3000)))


def roomy() -> HostMemory:
    return HostMemory(total=64 * GIB, free=32 * GIB, available=32 * GIB, limit="MemAvailable")


@settings(max_examples=60, deadline=None)
@given(
    files=st.dictionaries(NAMES, CONTENTS, max_size=12),
    compression=st.sampled_from([None, "lz4", "zlib", "snappy", "zstd", "auto"]),
    workers=st.integers(1, 4),
)
def test_what_is_staged_comes_back(files: dict[bytes, bytes], compression: str | None, workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(content)
        chosen = InMemorySettings(compression=compression, num_workers=workers, verify="none")
        segment, report = stage(Path(folder), chosen, host=roomy)
        dataset = HeldFiles.alone(segment)
        assert report.staged == len(files)
        for name, content in files.items():
            path = os.path.join(os.fsencode(folder), name)
            assert dataset.view(path) == content
            assert dataset.view(path) == content, "and again, now trusted"
            assert dataset.view(path + b"x") is None or path + b"x" in {
                os.path.join(os.fsencode(folder), n) for n in files
            }
