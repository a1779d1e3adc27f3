"""The index: few bytes per file, every key found, none invented."""

from __future__ import annotations

import numpy as np

from simpletuner_gh200.store.index import Index, IndexLayout, Rows, halves, place, write_index


def index_of(paths: list[bytes]) -> Index:
    rows = Rows.new(len(paths))
    for number, path in enumerate(paths):
        rows.key_low[number], rows.key_high[number] = halves(path)
        rows.offset[number] = number * 10
    return Index(write_index(rows), len(paths))


def test_every_path_is_found_and_no_other() -> None:
    paths = [f"/data/{number}.png".encode() for number in range(5000)]
    index = index_of(paths)
    assert [index.find(path) for path in paths] == list(range(5000))
    assert index.find(b"/data/5000.png") == -1
    assert index.rows.offset[4999] == 49990


def test_an_empty_index_finds_nothing() -> None:
    assert index_of([]).find(b"/data/a.png") == -1


def test_keys_that_want_one_slot_all_get_a_place() -> None:
    keys = np.full(100, 7, np.uint64)
    slots = place(keys)
    assert sorted(slots[slots > 0]) == list(range(1, 101))
    occupied = np.flatnonzero(slots)
    assert list(occupied) == list(range(7, 107)), "one unbroken run from the wanted slot, or a lookup would stop early"


def test_a_million_files_take_less_than_80_bytes_each() -> None:
    assert IndexLayout(1_000_000).nbytes / 1_000_000 <= 80 - 2, "two more: shared state and this process's mark"
