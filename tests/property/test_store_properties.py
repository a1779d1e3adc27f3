"""Whatever the files are called and hold: what is staged comes back, whole, under every codec."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.memory.host import HostMemory
from simpletuner_gh200.store.discovery import is_bookkeeping
from simpletuner_gh200.store.index import place
from simpletuner_gh200.store.reader import StagedDataset
from simpletuner_gh200.store.staging import StagingRequest, stage
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
        request = StagingRequest(Path(folder), compression=compression, workers=workers, verify="none")
        memory, report = stage(request, host=roomy)
        dataset = StagedDataset(memory)
        memory.close()
        assert report.staged == len(files)
        for name, content in files.items():
            path = os.path.join(os.fsencode(folder), name)
            assert dataset.view(path) == content
            assert dataset.view(path) == content, "and again, now trusted"
            assert dataset.view(path + b"x") is None or path + b"x" in {
                os.path.join(os.fsencode(folder), n) for n in files
            }


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=200))
def test_every_key_is_reached_by_probing_from_its_slot(keys: list[int]) -> None:
    slots = place(np.array(keys, np.uint64))
    assert sorted(slots[slots > 0]) == list(range(1, len(keys) + 1))
    for number, key in enumerate(keys):
        slot = key & (len(slots) - 1)
        while slots[slot] != number + 1:
            assert slots[slot] != 0, "a lookup would have given up here"
            slot = (slot + 1) & (len(slots) - 1)
