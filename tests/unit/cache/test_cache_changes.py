"""Entries go when their file does: written or deleted through us, or changed behind our back."""

from __future__ import annotations

import os

import pytest
import torch

from simpletuner_gh200.cache.control import Control
from simpletuner_gh200.cache.fill import take_in
from simpletuner_gh200.cache.segments import Segments
from simpletuner_gh200.cache.source import normal
from simpletuner_gh200.cache.table import MISSING, Table


def test_a_file_that_another_process_rewrote_is_a_miss(table, held, saved):
    path = held(torch.zeros(8))
    saved(torch.ones(8))
    assert table.get(path) is MISSING
    assert table.statistics.stale.value == 1
    assert take_in(table, path)
    assert torch.equal(table.get(path), torch.ones(8))


def test_a_deleted_file_is_a_miss(table, held):
    path = held(torch.zeros(8))
    os.remove(path)
    assert table.get(path) is MISSING
    assert table.find_all([path]) is None


def test_batches_notice_a_change_through_the_folder_watch(table, held, saved):
    paths = [held(torch.full((5000,), float(n)), f"{n}.pt") for n in range(4)]
    assert table.find_all(paths) is not None
    assert table.find_all(paths) is not None, "now vouched for by the watch, not looked at one by one"
    assert all(table._memo[path].vouched_for for path in paths)
    saved(torch.ones(5000), "2.pt")
    assert table.find_all(paths) is None
    assert table.get(paths[2]) is MISSING


def test_a_touched_file_whose_time_is_put_back_is_noticed_by_its_inode(table, held, saved, tmp_path):
    path = held(torch.zeros(5000))
    assert table.find_all([path]) is not None
    before = os.stat(path)
    torch.save(torch.ones(5000), tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert table.find_all([path]) is None
    assert table.get(path) is MISSING


def test_a_folder_that_was_replaced_is_noticed(table, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.cache.watch.LOOK_EVERY_SECONDS", -1.0)
    path = saved(torch.zeros(5000), "cache/a.pt")
    assert take_in(table, path)
    assert table.find_all([path]) is not None
    os.rename(tmp_path / "cache", tmp_path / "old")
    saved(torch.ones(5000), "cache/a.pt")
    assert table.find_all([path]) is None


def test_linked_files_are_always_looked_at(table, saved, tmp_path):
    saved(torch.zeros(5000), "real/a.pt")
    (tmp_path / "cache").mkdir()
    os.link(tmp_path / "real/a.pt", tmp_path / "cache/a.pt")
    path = str(tmp_path / "cache/a.pt")
    assert take_in(table, path)
    assert table.find_all([path]) is not None
    assert not table._memo[path].vouched_for
    with open(tmp_path / "real/a.pt", "r+b") as file:
        file.write(b"X")
    os.utime(tmp_path / "real/a.pt", ns=(1, 1))
    assert table.find_all([path]) is None


def test_dropping_withdraws_everything_and_gives_memory_back(table, held):
    paths = [held(torch.zeros(5000), f"{n}.pt") for n in range(5)]
    assert table.control.held > 0
    table.drop()
    assert table.control.held == 0
    assert all(table.get(path) is MISSING for path in paths)
    assert take_in(table, paths[0]), "and it can be filled again"
    assert torch.equal(table.get(paths[0]), torch.zeros(5000))


def test_rewriting_an_entry_replaces_it(table, held, saved):
    path = held(torch.zeros(8))
    for turn in range(20):
        saved(torch.full((8,), float(turn)))
        table.invalidate(path)
        assert take_in(table, path)
        assert table.get(path)[0] == turn


def test_what_does_not_fit_the_budget_is_refused_and_counted(saved):
    table = Table("small", Control.create(8, label="small", shared=False), allowed=10_000)
    paths = [saved(torch.zeros(1000), f"{n}.pt") for n in range(4)]
    assert [take_in(table, path) for path in paths] == [True, True, False, False]
    assert table.statistics.fallbacks == {"over budget": 2}
    assert table.control.held <= 10_000


@pytest.mark.parametrize("budgets", [range(200, 460), range(70_000, 76_000, 37)], ids=["small", "lent"])
def test_the_budget_holds_to_the_byte_gaps_included(budgets):
    """Payloads that are lent begin on a page of their own, others at the next multiple of 64."""
    for budget in budgets:
        control = Control.create(64, label="small", shared=False)
        segments = Segments("small", control, None, 1 << 20)
        places = [segments.reserve(b"layout", size, budget) for size in (1, 100, 63, 65_600, 5, 1)]
        assert places[0] is not None
        assert control.held <= budget


def test_a_full_index_refuses_and_keeps_what_it_has(saved):
    table = Table("full", Control.create(1, label="full", shared=False))
    paths = [saved(torch.zeros(1), f"{n}.pt") for n in range(200)]
    taken = [take_in(table, path) for path in paths]
    assert taken == [True] * 192 + [False] * 8
    assert table.statistics.fallbacks == {"index full, or dropped meanwhile": 8}
    assert table.get(paths[0]) is not MISSING


def test_entries_outside_the_subset_are_not_held(table, saved):
    table.control.threshold = 0
    assert not take_in(table, saved(torch.zeros(3)))
    assert table.statistics.fallbacks == {"not in the subset that fits": 1}


def test_an_unreadable_file_is_left_to_upstream(table, tmp_path):
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a tensor")
    assert not take_in(table, normal(broken))
    (reason,) = table.statistics.fallbacks
    assert reason.startswith("unreadable")


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/gh200-evil",)


def test_files_are_never_unpickled_freely(table, tmp_path):
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    assert not take_in(table, str(tmp_path / "evil.pt"))
    assert not os.path.exists("/tmp/gh200-evil")
