"""What is asked of many files, keys and places at once: the same answers as one by one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.entries import Ready
from simpletuner_gh200.cache.lending import LEND_FROM
from simpletuner_gh200.cache.record import encode
from simpletuner_gh200.cache.segment import place, places
from simpletuner_gh200.cache.slots import Key, key_of, keys_of
from simpletuner_gh200.cache.source import Recognizer, identify, ordinary, source_of
from simpletuner_gh200.cache.table import Table

MANY = 40


@given(
    st.integers(0, 1 << 20),
    st.lists(st.sampled_from([0, 1, 64, 65, 4096, LEND_FROM - 1, LEND_FROM, 3 * LEND_FROM + 1])),
)
def test_places_of_many_are_those_of_one_after_the_other(used, sizes):
    expected, end = [], used
    for size in sizes:
        expected.append(place(end, size))
        end = expected[-1] + size
    assert places(used, np.array(sizes, np.uint64)).tolist() == expected


def test_files_are_recognised_together_as_they_are_one_by_one(tmp_path):
    paths = [
        str(tmp_path / f"{name}.pt")
        for name in ("plain", "changed", "gone", "linked", "two names", "rewritten", "ümlaut")
    ]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"content of " + os.fsencode(path))
    known = [identify(path, source_of(path)) for path in paths]
    with open(paths[1], "ab") as file:
        file.write(b"more")
    os.unlink(paths[2])
    os.rename(paths[3], tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", paths[3])
    os.link(paths[4], tmp_path / "another")
    times = os.stat(paths[5])
    with open(paths[5], "r+b") as file:
        file.write(b"CONTENT")
    os.utime(paths[5], ns=(times.st_atime_ns, times.st_mtime_ns))
    entries = list(zip(paths, known, strict=True))
    seen = Recognizer().sources(entries)
    assert [one.source for one in seen] == [Recognizer().source(path, identity) for path, identity in entries]
    assert [one.source is not None for one in seen] == [True, False, False, True, True, False, True]
    there = [at for at in range(len(paths)) if at != 2]
    assert [seen[at].ordinary for at in there] == [ordinary(paths[at]) for at in there]
    assert [bool(seen[at].ordinary) for at in (0, 3, 4)] == [True, False, False]


def test_any_number_that_a_file_system_gives_is_compared(tmp_path, saved):
    """Hashes of 64 bits for inodes, and times before 1970."""
    path = saved(torch.zeros(3), "old.pt")
    os.utime(path, ns=(-5, -5))
    identity = identify(path, source_of(path))
    assert identity is not None and identity.mtime_ns < 0
    copied = identity._replace(inode=(1 << 64) - 3)
    seen = Recognizer().sources([(path, identity), (path, copied)])
    assert [one.source for one in seen] == [source_of(path)] * 2


def table_of(*, keys: int = 1000, allowed: int | None = None) -> Table:
    return Table("t", Control.create(keys, label="t", shared=False), allowed=allowed)


def columns(paths, layout: bytes, sizes) -> Ready:
    return Ready(
        keys=keys_of(paths),
        layouts=[layout],
        kinds=np.zeros(len(paths), np.intp),
        sizes=np.array(sizes, np.uint64),
        flags=np.zeros(len(paths), np.uint64),
        sources=np.array([source_of(path) for path in paths], np.uint64),
    )


@given(st.lists(st.text(max_size=300).map(lambda text: "/" + text), max_size=20))
def test_keys_of_many_are_those_of_each(paths):
    assert [Key(*row) for row in keys_of(paths).tolist()] == [key_of(path) for path in paths]


def test_entries_of_several_layouts_are_published_together(tmp_path, saved):
    """Whether a layout is stored already or met for the first time in mid-batch."""
    values = [torch.arange(5 + number % 3) + number for number in range(MANY)]
    paths = [saved(value, f"{number}.pt") for number, value in enumerate(values)]
    table, records = table_of(), [encode(value) for value in values]
    layouts = sorted({record.layout for record in records})

    def put(writer, which, offsets):
        for number, offset in zip(which.tolist(), offsets.tolist(), strict=True):
            writer.fill(offset, records[number].pieces)

    assert table.publish(paths[0], records[0], source_of(paths[0]))
    ready = columns(paths, b"", [record.size for record in records])
    ready = ready._replace(layouts=layouts, kinds=np.array([layouts.index(record.layout) for record in records]))
    assert table.publish_many(ready, put) == len(paths)
    assert all(torch.equal(table.get(path), value) for path, value in zip(paths, values, strict=True))


def test_what_is_lacking_is_told_for_many_keys_as_for_one(tmp_path, saved):
    paths = [saved(torch.full((10,), float(number)), f"{number}.pt") for number in range(MANY)]
    table = table_of()
    for path in paths[::3]:
        assert table.publish(path, encode(torch.zeros(10)), source_of(path))
    for path in paths[::6]:
        table.invalidate(path)
    keys = [key_of(path) for path in paths]
    table.set_threshold(sorted(key.high for key in keys[::6])[3])  # some of those withdrawn are admitted, some are not
    expected = [table.admits(key) and table.control.slots.get(key) is None for key in keys]
    assert table.lacks(keys_of(paths)).tolist() == expected
    assert set(expected) == {True, False}
    withdrawn = expected[::6]
    assert withdrawn == [table.admits(key) for key in keys[::6]], "a withdrawn entry is lacking"
    assert any(withdrawn)


@pytest.mark.parametrize("allowed", [None, 6000])
def test_columns_are_published_as_single_entries_would_be(tmp_path, saved, allowed):
    values = [torch.arange(50) + number for number in range(MANY)]
    paths = [saved(value, f"{number}.pt") for number, value in enumerate(values)]
    table, records = table_of(allowed=allowed), [encode(value) for value in values]

    def put(writer, which, offsets):
        for number, offset in zip(which, offsets, strict=True):
            writer.fill(offset, records[number].pieces)

    entered = table.publish_many(columns(paths, records[0].layout, [record.size for record in records]), put)
    found = [table.find(path) for path in paths]
    assert sum(one is not None for one in found) == entered
    assert entered == (MANY if allowed is None else table.control.held // 448)
    for value, one in zip(values, found, strict=True):
        assert one is None or torch.equal(table.value_of(one), value)
    lost = MANY - entered
    assert table.statistics.fallbacks == ({"over budget": lost} if lost else {})
    again = table.publish_many(columns(paths[:5], records[0].layout, [400] * 5), put)
    assert again == (5 if allowed is None else 0), "newer content takes the place of the older"
