"""In-memory datasets in real SimpleTuner: same losses, same caches, one copy for all ranks, nothing left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simpletuner_gh200.demo.project import dataset_list
from tests.integration.workbench import RANKS, probe

PROBE = probe("reads")


@pytest.mark.parametrize("world", RANKS)
def test_losses_are_those_of_local_files(workbench, world):
    stock = workbench.known(stock=True, world=world)
    assert stock.ok, stock.explain()
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"compression": "auto", "wait": True}})
    ours = workbench.train(world=world)
    assert ours.ok, ours.explain()
    assert ours.losses == stock.losses
    assert ours.same_lora(stock)
    staged = ours.summaries[0]["details"]["store"]["tiny-images"]
    assert staged["staged"] == 48, "images and captions"
    for summary in ours.summaries:
        held = summary["details"]["store"]["tiny-images"]
        assert held["files"] == 48, "every rank serves the same memory"
        assert 0 < held["elsewhere_in_training"] <= held["elsewhere"], "latents, which SimpleTuner's own cache reads"


@pytest.mark.one_release("4.")
def test_nothing_is_read_from_disk_while_it_trains(workbench):
    caches = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"}
    held = {"type": "in_memory", "in_memory": {"wait": True}}
    workbench.configure(blocks={"cache_config": caches}, dataset=held, max_train_steps=4)
    run = workbench.train()
    assert run.ok, run.explain()
    details = run.summaries[0]["details"]
    assert details["store"]["tiny-images"]["elsewhere_in_training"] == 0
    assert {found["misses_in_training"] for found in details["caches"].values()} == {0}


@pytest.mark.parametrize("world", RANKS)
def test_a_dataset_that_comes_while_training_changes_no_loss(workbench, world):
    """The default: captions are there at once, the rest when it has come."""
    stock = workbench.known(stock=True, world=world)
    workbench.configure(dataset={"type": "in_memory"})
    ours = workbench.train(world=world, probe=PROBE)
    assert ours.ok, ours.explain()
    assert ours.losses == stock.losses
    assert ours.same_lora(stock)
    for summary, record in zip(ours.summaries, ours.records, strict=True):
        assert summary["details"]["store"]["tiny-images"]["served"] >= 24, "captions"
        assert not [name for name in record["opened"] if name.endswith(".txt")]


@pytest.mark.one_release("4.")
def test_broken_files_found_while_training_end_every_rank_at_the_same_step(workbench):
    workbench.configure(dataset={"type": "in_memory"}, max_train_steps=400)
    run = workbench.train(world=2, timeout=200, probe=probe("breaking_images"))
    assert not run.ok
    for rank in (0, 1):
        assert "files are broken" in run.log(rank), run.explain()
    assert len(run.losses[0]) == len(run.losses[1]) < 400


@pytest.mark.one_release("4.")
def test_fresh_caches_are_filled_from_memory(workbench):
    """Captions, VAE and text encoding, all from memory. Newer releases probe each image's header on disk, once."""
    for folder in ("cache", "output"):
        shutil.rmtree(workbench.project.folder / folder, ignore_errors=True)
    for index in workbench.project.images.glob("aspect_ratio_bucket_*"):
        index.unlink()
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"wait": True}}, max_train_steps=2)
    run = workbench.train(probe=PROBE)
    assert run.ok, run.explain()
    opened = run.records[0]["opened"]
    assert len(opened) == len(set(opened)), "no file twice"
    assert not [name for name in opened if name.endswith(".txt")]
    served = run.summaries[0]["details"]["store"]["tiny-images"]
    assert served["served"] >= 48
    assert served["mismatches"] == 0
    assert list(workbench.project.images.glob("aspect_ratio_bucket_indices_*")), "bookkeeping went through to disk"


@pytest.mark.one_release("4.")
def test_with_shard_a_node_stages_what_its_ranks_were_dealt(workbench):
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"per_node": "shard"}}, max_train_steps=2)
    run = workbench.train(world=2, probe=probe("two_nodes"))
    assert run.ok, run.explain()
    held = [summary["details"]["store"]["tiny-images"]["staged"] for summary in run.summaries]
    assert held == [24, 24], "half of the images each, with their captions"


@pytest.mark.one_release("3.")
def test_too_large_a_dataset_stops_every_rank_with_the_reason(workbench):
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"memory_limit_gb": 1e-6}})
    run = workbench.train(world=2, timeout=120)
    assert not run.ok
    for rank in (0, 1):
        assert "and 1.05 KiB is allowed" in run.log(rank), run.explain()


@pytest.mark.one_release("3.")
def test_text_embeds_from_memory_change_no_loss(workbench):
    stock = workbench.known(stock=True)
    images, embeds = dataset_list(workbench.project, {"type": "in_memory", "in_memory": {"compression": "lz4"}})
    workbench.configure(datasets=[images, {**embeds, "type": "in_memory"}])
    ours = workbench.train()
    assert ours.ok, ours.explain()
    assert ours.losses == stock.losses
    held = ours.summaries[0]["details"]["store"]["tiny-text-embeds"]
    assert held["served"] > 0


@pytest.mark.one_release("4.")
def test_a_run_resumes_from_memory_where_local_files_left_it(workbench):
    """Local for the first half, in memory for the second: it goes on at the same step with the same caches."""
    workbench.configure(max_train_steps=4)
    first = workbench.train(stock=True)
    assert first.ok, first.explain()
    workbench.configure(dataset={"type": "in_memory"}, max_train_steps=8)
    caches = sorted((workbench.project.folder / "cache" / "vae").rglob("*.pt"))
    assert caches, "there are latents to keep"
    before = [path.stat().st_mtime_ns for path in caches]
    second = workbench.train()
    assert second.ok, second.explain()
    assert second.summaries[0]["global_step"] == 8
    assert len(second.losses[0]) == 4
    assert [path.stat().st_mtime_ns for path in caches] == before, "no latent was made anew"


@pytest.mark.one_release("4.")
def test_if_rank_0_is_killed_while_staging_the_others_stop_and_nothing_is_left(workbench):
    def shared() -> set[Path]:
        return set(Path("/dev/shm").glob("*gh200*"))

    before = shared()
    workbench.configure(dataset={"type": "in_memory", "in_memory": {"wait": True}})
    run = workbench.train(world=2, timeout=120, probe=probe("killed_staging"))
    assert run.exit_codes[0] != 0
    assert "local rank 0 ended before it shared 'dataset tiny-images'" in run.log(1), run.explain()
    assert shared() <= before
