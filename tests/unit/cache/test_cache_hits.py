"""Safe hits: whatever a caller does to what it got, the next one gets what was cached."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from simpletuner_gh200.cache.lending import LEND_FROM
from simpletuner_gh200.cache.source import normal
from simpletuner_gh200.cache.table import MISSING, Table

LARGE = LEND_FROM // 4 + 1000
"""Elements of a float32 tensor that is lent, not copied, and ends within a page."""

SIZES = pytest.mark.parametrize("count", [100, LARGE], ids=["copied", "lent"])


@SIZES
def test_a_write_changes_neither_the_next_hit_nor_one_that_is_out(table, held, count):
    value = torch.arange(count, dtype=torch.float32)
    path = held(value)
    first, second = table.get(path), table.get(path)
    first.fill_(-1)
    assert torch.equal(second, value)
    assert torch.equal(table.get(path), value)
    second.neg_()
    assert torch.equal(first, torch.full_like(value, -1)), "a later hit must not disturb an earlier one"
    del first, second
    gc.collect()
    assert torch.equal(table.get(path), value)


def test_a_write_to_one_page_is_undone_when_its_holder_lets_go(table, held):
    value = torch.arange(LARGE, dtype=torch.float32)
    path = held(value)
    for position in (0, LARGE // 2, LARGE - 1):
        borrowed = table.get(path)
        borrowed[position] = -1
        del borrowed
        assert torch.equal(table.get(path), value), position


def test_a_lent_hit_is_not_a_copy(table, held):
    path = held(torch.zeros(LARGE))
    first = table.get(path).data_ptr()
    assert table.get(path).data_ptr() == first, "the same pages again, since nobody holds them"


def test_containers_are_fresh(table, held):
    path = held({"latents": torch.zeros(3), "meta": [1, 2]})
    first = table.get(path)
    first["meta"].append(3)
    first["extra"] = 1
    assert table.get(path)["meta"] == [1, 2]
    assert "extra" not in table.get(path)


def test_a_view_keeps_the_loan(table, held):
    value = torch.arange(LARGE, dtype=torch.float32)
    path = held(value)
    row = table.get(path)[5:10]
    row.fill_(0)
    assert torch.equal(table.get(path), value), "the entry is still on loan, so this is a copy"
    assert torch.equal(row, torch.zeros(5))


def test_threads_read_at_the_same_time(table, held):
    values = {held(torch.full((LARGE,), float(n)), f"{n}.pt"): float(n) for n in range(4)}

    def read(turn):
        path = list(values)[turn % 4]
        got = table.get(path)
        right = bool((got == values[path]).all())
        got.fill_(-1)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    assert table.statistics.hits.value == 200


def test_hits_outlive_the_table(table, held):
    value = torch.rand(LARGE)
    path = held(value)
    hit = table.get(path)
    table.drop()
    table.close()
    gc.collect()
    assert torch.equal(hit, value)
    assert table.get(path) is MISSING


def test_a_forked_child_reads_and_writes_without_effect(table, held):
    value = torch.arange(LARGE, dtype=torch.float32)
    path = held(value)
    expected = value.numpy().copy()
    child = os.fork()
    if child == 0:
        # numpy only: torch's thread pool does not survive a fork.
        got = table.get(path).numpy()
        right = (got == expected).all()
        got[:] = -1
        os._exit(0 if right and (table.get(path).numpy() == expected).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(table.get(path), value)


def test_without_a_page_map_hits_are_copies(table, held, monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.cache.lending._pagemap.open", lambda: False)
    value = torch.arange(LARGE, dtype=torch.float32)
    path = held(value)
    table.get(path).fill_(-1)
    assert torch.equal(table.get(path), value)


@pytest.mark.parametrize("given", ["/a/b.pt", "/a//b.pt", "/a/./b.pt", "/a/c/../b.pt"])
def test_paths_are_known_in_any_form(given):
    assert normal(given) == "/a/b.pt"


def test_relative_paths_and_path_objects_find_the_entry(table, held, tmp_path, monkeypatch):
    held(torch.ones(3), "x.pt")
    monkeypatch.chdir(tmp_path)
    assert isinstance(table, Table)
    assert torch.equal(table.get("x.pt"), torch.ones(3))
    assert torch.equal(table.get(tmp_path / "x.pt"), torch.ones(3))
