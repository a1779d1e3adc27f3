"""The HBM tier's bookkeeping, with host memory standing in for the device's."""

from __future__ import annotations

import weakref

import pytest
import torch

from simpletuner_gh200.cache.buffers import BufferPool
from simpletuner_gh200.cache.hbm import HbmTier, through
from simpletuner_gh200.memory.lane import Copier, HostLane
from simpletuner_gh200.seams.features.caches.batch_path import join_embeds
from simpletuner_gh200.units import format_bytes

COUNT = 70_000
SIZE = COUNT * 4


@pytest.fixture
def copier():
    made = Copier(HostLane())
    yield made
    made.close()


@pytest.fixture
def tier(table, copier):
    made = HbmTier([table], through(copier, torch.device("cpu")))
    made.allow(2 * SIZE)
    return made


def embeds(held, number):
    return held({"prompt_embeds": torch.full((1, COUNT, 1), float(number))}, f"{number}.pt")


def test_a_fixed_subset_is_kept_and_the_rest_is_copied_each_time(table, held, tier):
    paths = [embeds(held, number) for number in range(3)]
    for _ in range(3):
        for number, path in enumerate(paths):
            assert float(tier.on_device(table.get(path)["prompt_embeds"])[0, -1, 0]) == number
    assert tier.used == 2 * SIZE
    assert tier.hits == 4, "two of three, in the second and third round"


def test_a_tensor_that_was_written_to_is_not_taken_for_its_entry(table, held, tier):
    path = embeds(held, 1)
    tier.on_device(table.get(path)["prompt_embeds"])
    changed = table.get(path)["prompt_embeds"]
    changed.fill_(5)
    assert float(tier.on_device(changed)[0, 0, 0]) == 5
    del changed
    assert float(tier.on_device(table.get(path)["prompt_embeds"])[0, 0, 0]) == 1


def test_copies_that_are_not_lent_are_never_kept(table, held, tier):
    path = embeds(held, 1)
    first = table.get(path)["prompt_embeds"]
    second = table.get(path)["prompt_embeds"]
    tier.on_device(second)
    assert tier.used == 0, "the entry is on loan, so the second hit is a copy"
    tier.on_device(first)
    assert tier.used == SIZE


def test_dropping_the_cache_drops_the_copies(table, held, tier):
    path = embeds(held, 1)
    tier.on_device(table.get(path)["prompt_embeds"])
    table.drop()
    path = embeds(held, 2)
    assert float(tier.on_device(table.get(path)["prompt_embeds"])[0, 0, 0]) == 2
    assert tier.used == SIZE


def test_embeds_are_joined_from_the_tier(table, held, tier):
    outputs = [table.get(embeds(held, number)) for number in range(3)]
    joined = join_embeds(outputs, BufferPool(), tier)
    assert torch.equal(joined["prompt_embeds"], torch.cat([output["prompt_embeds"] for output in outputs]))


def test_nothing_is_kept_before_training_has_taken_its_memory(table, held, copier):
    tier = HbmTier([table], through(copier, torch.device("cpu")))
    path = embeds(held, 1)
    for _ in range(2):
        assert float(tier.on_device(table.get(path)["prompt_embeds"])[0, 0, 0]) == 1
    assert (tier.used, tier.hits) == (0, 0)


def test_all_copies_go_when_memory_runs_out_and_none_is_kept_again(table, held, tier, caplog):
    paths = [embeds(held, number) for number in range(2)]
    kept = [tier.on_device(table.get(path)["prompt_embeds"]) for path in paths]
    gone = [weakref.ref(copy) for copy in kept]
    del kept
    assert tier.used == 2 * SIZE and all(copy() is not None for copy in gone)
    for _ in range(2):
        tier.give_up()
    assert all(copy() is None for copy in gone), "the memory is free"
    assert [record.message for record in caplog.records if "gave back" in record.message] == [
        f"gh200: device memory ran out: hot text embeds gave back {format_bytes(2 * SIZE)}"
    ]
    tier.allow(2 * SIZE)
    assert float(tier.on_device(table.get(paths[1])["prompt_embeds"])[0, 0, 0]) == 1
    assert tier.used == 0


def test_a_copy_that_finds_no_memory_is_made_once_the_others_have_gone(table, held, copier):
    refused = []
    copy = through(copier, torch.device("cpu"))

    def scarce(tensor, place):
        if tier.used:
            refused.append(tier.used)
            raise torch.cuda.OutOfMemoryError("no room")
        return copy(tensor, place)

    tier = HbmTier([table], scarce)
    tier.allow(2 * SIZE)
    first, second = (embeds(held, number) for number in (1, 2))
    tier.on_device(table.get(first)["prompt_embeds"])
    assert float(tier.on_device(table.get(second)["prompt_embeds"])[0, 0, 0]) == 2
    assert refused == [SIZE] and tier.given_up


def test_joining_that_finds_no_memory_is_left_to_upstream(table, held, tier, monkeypatch):
    outputs = [table.get(embeds(held, number)) for number in range(2)]

    def full(*_):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "cat", full)
    assert join_embeds(outputs, BufferPool(), tier) == {}
    assert tier.given_up
