"""Who writes: the process that made a cache, with barriers; and what it wrote is mapped before it is used."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import fill, take_in
from simpletuner_gh200.cache.slots import Range, Slot, Slots, key_of
from simpletuner_gh200.cache.table import MISSING, Table
from simpletuner_gh200.memory.mapping import PAGE

LARGE = 80_000
"""Numbers of an entry that is lent."""


def in_child(work):
    """What ``work`` returned, as text, in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "many at once"])
def test_a_forked_process_reads_on_and_writes_nothing(table, held, saved, together):
    before = held(torch.full((LARGE,), 1.0), "before.pt")
    theirs, ours = (saved(torch.full((LARGE,), value), f"{value}.pt") for value in (2.0, 3.0))

    def child():
        if together:
            fill(table, [theirs], workers=1)
        else:
            take_in(table, theirs)
        gone = table.invalidate(before)
        reasons = {reason for reason in table.statistics.fallbacks if "fork" in reason}
        return len(reasons), gone, float(table.get(before)[0]), table.get(theirs) is MISSING

    assert in_child(child) == repr((1, False, 1.0, True))
    assert take_in(table, ours)
    assert table.get(theirs) is MISSING
    assert [float(table.get(path)[0]) for path in (before, ours)] == [1, 3]
    assert take_in(table, theirs)
    assert [float(table.get(path)[0]) for path in (before, theirs, ours)] == [1, 2, 3]


def test_a_forked_process_notices_a_changed_file_and_leaves_the_entry_to_its_parent(table, held, saved):
    path = held(torch.full((LARGE,), 1.0), "changed.pt")
    saved(torch.full((LARGE + 1,), 2.0), "changed.pt")
    assert in_child(lambda: table.get(path) is MISSING) == "True"
    assert table.control.slots.get(key_of(path)) is not None
    assert table.get(path) is MISSING
    assert table.control.slots.get(key_of(path)) is None


def test_no_store_to_an_index_is_python_s():
    """Python has no barriers: where stores are reordered, a reader would see a slot before the bytes that it names."""
    words = memoryview(bytearray(64 * 8)).cast("Q")
    slots, key = Slots(words.toreadonly()), key_of("/a.pt")
    rows = np.array([[*key, *Slot.of(Range(1, 64), 5, 0, (3, 4), Range(1, 0))[:5]]], np.uint64)
    for number in (1, 2):
        slot = Slot.of(Range(number, 64), 5, 0, (3, 4), Range(1, 0))
        assert slots.put(key, slot) and slots.get(key)[:5] == slot[:5]
    assert slots.remove(key)[:5] == slot[:5] and slots.get(key) is None
    assert slots.put_many(rows, 0)[1].all() and slots.get(key).segment == 1
    assert Control.create(8, label="test", shared=False).words.readonly


def present(address, size):
    """Of each page: is it mapped?"""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        words = np.frombuffer(os.pread(pages.fileno(), size // PAGE * 8, address // PAGE * 8), np.uint64)
    return (words >> np.uint64(63)).astype(bool)


def test_every_segment_that_was_written_is_mapped(saved):
    table = Table("small", Control.create(64, label="small", shared=False), growth=1 << 20)
    paths = [saved(torch.full((LARGE,), float(number)), f"{number}.pt") for number in range(8)]
    assert all(take_in(table, path) for path in paths)
    assert len(table.control.rows()) > 2
    hits = [table.get(path) for path in paths]
    assert not any(present(hit.data_ptr(), hit.nbytes).any() for hit in hits)
    table.populate()
    assert [bool(present(hit.data_ptr(), hit.nbytes).all()) for hit in hits] == [True] * len(paths)
    table.close()
