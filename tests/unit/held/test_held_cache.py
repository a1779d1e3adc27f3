"""Safe hits: whatever a caller does to what it got, the next one gets what was cached; entries go with their file."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from simpletuner_gh200.held.buffers import SMALLEST
from simpletuner_gh200.held.cache import MISSING
from simpletuner_gh200.held.fill import Filler
from simpletuner_gh200.held.source import normal
from tests.unit.held.held_samples import in_child

LARGE = SMALLEST // 4 + 1000
"""Elements of a float32 tensor whose hits lie in memory that is used again."""

SIZES = pytest.mark.parametrize("count", [100, LARGE], ids=["small", "large"])


@SIZES
def test_a_write_changes_neither_the_next_hit_nor_one_that_is_out(cache, held, count):
    value = torch.arange(count, dtype=torch.float32)
    path = held(value)
    first, second = cache.get(path), cache.get(path)
    first.fill_(-1)
    assert torch.equal(second, value)
    assert torch.equal(cache.get(path), value)
    row = second[5:10]
    second.neg_()
    assert torch.equal(first, torch.full_like(value, -1)), "a later hit must not disturb an earlier one"
    del first, second
    gc.collect()
    assert torch.equal(cache.get(path), value)
    assert torch.equal(row, -value[5:10]), "a view keeps its hit"


def test_containers_are_fresh(cache, held):
    path = held({"latents": torch.zeros(3), "meta": [1, 2]})
    first = cache.get(path)
    first["meta"].append(3)
    first["extra"] = 1
    assert cache.get(path)["meta"] == [1, 2]
    assert "extra" not in cache.get(path)


def test_threads_read_at_the_same_time(cache, held):
    values = {held(torch.full((LARGE,), float(n)), f"{n}.pt"): float(n) for n in range(4)}

    def read(turn):
        path = list(values)[turn % 4]
        got = cache.get(path)
        right = bool((got == values[path]).all())
        got.fill_(-1)
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    assert cache.statistics.hits == 200


@pytest.mark.parametrize("end", ["drop", "close"])
def test_hits_outlive_what_is_held(cache, held, end):
    value = torch.rand(LARGE)
    path = held(value)
    hit, found = cache.get(path), cache.find(path)
    getattr(cache, end)()
    gc.collect()
    assert torch.equal(hit, value)
    assert found.payload.tobytes() == value.numpy().tobytes()
    assert cache.get(path) is MISSING
    assert cache.held_bytes == 0


def test_a_forked_child_reads_on_and_writes_without_effect(cache, held, saved):
    value = torch.arange(LARGE, dtype=torch.float32)
    path, changed = held(value), held(torch.zeros(3), "changed.pt")
    expected = value.numpy().copy()

    def work():
        got = cache.get(path).numpy()  # numpy only: torch's thread pool does not survive a fork
        right = (got == expected).all()
        got[:] = -1
        os.unlink(changed)
        return right and cache.get(changed) is MISSING and (cache.get(path).numpy() == expected).all()

    assert in_child(work)
    assert torch.equal(cache.get(path), value)
    assert cache.get(changed) is MISSING, "the parent sees it by itself"


@pytest.mark.parametrize("given", ["/a/b.pt", "/a//b.pt", "/a/./b.pt", "/a/c/../b.pt"])
def test_paths_are_known_in_any_form(given):
    assert normal(given) == "/a/b.pt"


def test_relative_paths_and_path_objects_find_the_entry(cache, held, tmp_path, monkeypatch):
    held(torch.ones(3), "x.pt")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(cache.get("x.pt"), torch.ones(3))
    assert torch.equal(cache.get(tmp_path / "x.pt"), torch.ones(3))


# -- entries go when their file does -------------------------------------------------------------------------------


def test_a_file_that_another_process_rewrote_is_a_miss_until_it_is_taken_in_again(cache, held, saved):
    path = held(torch.zeros(8))
    for turn in (1.0, 2.0):
        saved(torch.full((8,), turn))
        assert cache.get(path) is MISSING
        Filler(cache).fill([path])
        assert float(cache.get(path)[0]) == turn
    assert cache.statistics.stale == 2


def test_a_deleted_file_is_a_miss(cache, held):
    path = held(torch.zeros(8))
    os.remove(path)
    assert cache.get(path) is MISSING
    assert cache.find_all([path]) is None


def test_batches_notice_a_change(cache, held, saved):
    paths = [held(torch.full((5000,), float(n)), f"{n}.pt") for n in range(4)]
    assert cache.find_all(paths) is not None
    saved(torch.ones(5000), "2.pt")
    assert cache.find_all(paths) is None
    assert cache.get(paths[2]) is MISSING


def test_a_touched_file_whose_time_is_put_back_is_noticed_by_its_inode(cache, held, tmp_path):
    path = held(torch.zeros(5000))
    assert cache.find_all([path]) is not None
    before = os.stat(path)
    torch.save(torch.ones(5000), tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert cache.find_all([path]) is None


def test_a_folder_that_was_replaced_is_noticed(cache, held, saved, tmp_path):
    path = held(torch.zeros(5000), "cache/a.pt")
    assert cache.find_all([path]) is not None
    os.rename(tmp_path / "cache", tmp_path / "old")
    saved(torch.ones(5000), "cache/a.pt")
    assert cache.find_all([path]) is None


def test_a_change_under_another_name_is_noticed(cache, saved, tmp_path):
    saved(torch.zeros(5000), "real/a.pt")
    (tmp_path / "cache").mkdir()
    os.link(tmp_path / "real/a.pt", tmp_path / "cache/a.pt")
    path = str(tmp_path / "cache/a.pt")
    Filler(cache).fill([path])
    assert cache.find(path) is not None
    with open(tmp_path / "real/a.pt", "r+b") as file:
        file.write(b"X")
    os.utime(tmp_path / "real/a.pt", ns=(1, 1))
    assert cache.find_all([path]) is None


def test_a_forked_child_waits_for_no_lock_of_its_parents_threads(cache, held):
    """They may be filling or joining a batch when a data loader forks."""
    path = held(torch.arange(LARGE, dtype=torch.float32))
    with cache._buffers._lock, cache.shelf._lock:
        assert in_child(lambda: cache.get(path).numpy()[-1] == LARGE - 1)
