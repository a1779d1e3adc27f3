"""Unified caches in real SimpleTuner: hits come from held memory, and no number changes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil

import pytest
import torch

from simpletuner_gh200.demo.project import dataset_list
from simpletuner_gh200.held.fill import load_file
from simpletuner_gh200.held.pack_place import PackPlace
from tests.integration.workbench import NEWEST_ALONE, OLDEST_ALONE, RANKS, probe

UNIFIED = {
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "fill": "start"},
}
"""Filled before training starts, so that what is served from where can be told beforehand."""
OLD = importlib.metadata.version("simpletuner").startswith("3.")
MODE = probe("latents_without_chance")
EPOCH = 12
"""Steps: 24 images in batches of two."""


def reports(run):
    return [summary["details"]["caches"] for summary in run.summaries]


def limited(**keys):
    return {"cache_config": {**UNIFIED["cache_config"], **keys}}


def compare(workbench, configure, *, world=1, blocks=UNIFIED, before=None, probe=None, steps=None, files=True):
    """Train with plain caches, then with ours, from the same state; losses and weights must be the same.

    ``before``: changes that state, once with the blocks None, once with ours. ``steps``: only so many, where two plain
    runs already differ after that; ``files``: so do the files they leave.
    """
    if before is None:
        configure()
        stock = workbench.known(stock=True, world=world, probe=probe)
    else:
        before(None)
        configure()
        stock = workbench.train(stock=True, world=world, probe=probe)
        workbench.set_aside(stock)
        before(blocks)
    assert stock.ok, f"SimpleTuner by itself does not get through this: {stock.explain()}"
    configure(blocks=blocks)
    ours = workbench.train(world=world, probe=probe)
    assert ours.ok, ours.explain()
    assert [losses[:steps] for losses in ours.losses] == [losses[:steps] for losses in stock.losses]
    assert steps is not None or ours.same_lora(stock)
    assert not files or files_of(ours.folder) == files_of(stock.folder), "SimpleTuner's own files are as without us"
    return ours


def files_of(project):
    """Every file of SimpleTuner's, with what is in it."""
    paths = [path for folder in ("images", "cache") for path in (project / folder).rglob("*")]
    kept = (path for path in paths if path.suffix in (".pt", ".png", ".jpg"))
    return {str(path.relative_to(project)): content_of(path) for path in kept}


def content_of(path):
    """By value: SimpleTuner writes the embed of the empty caption anew at every start, with the time in the archive."""
    if path.suffix != ".pt":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return described(load_file(str(path)))


def described(value):
    if isinstance(value, torch.Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    return repr(value)


def plain_config(workbench, **keys):
    def configure(blocks=None):
        workbench.configure(blocks=blocks, **keys)

    return configure


@pytest.mark.parametrize("world", RANKS)
def test_losses_and_weights_are_those_of_plain_caches(workbench, world):
    run = compare(workbench, plain_config(workbench), world=world)
    for report in reports(run):
        for found in report.values():
            assert found["hits"] > 0, report
            assert found["misses"] == found["misses_in_training"] == 0, report
            assert found["fallbacks"] == {}, report
        assert any(found["batched"] for found in report.values()), "latents went straight into batches"


@pytest.mark.parametrize("world", RANKS)
def test_filling_while_training_changes_no_number(workbench, world):
    """The default. Whether an entry came in time for its first use is chance; what it holds is not."""
    run = compare(workbench, plain_config(workbench), world=world, blocks=limited(fill="background"))
    for report in reports(run):
        for found in report.values():
            assert found["filling"] in ("done", "stopped"), report
            assert found["fallbacks"] == {}, report
        assert sum(found["hits"] + found["misses"] for found in report.values()) > 0
    # What came in time went into packs, and is there at the next start.
    packed = sum(found["entries"] for found in reports(run)[0].values())
    again = workbench.train(world=world)
    assert again.ok, again.explain()
    assert packed > 0
    assert "entries at hand in packs" in again.log()


@NEWEST_ALONE
def test_latents_made_on_demand(workbench, world):
    def no_latents(_blocks):
        shutil.rmtree(workbench.project.folder / "cache" / "vae")

    keys = {"vae_cache_ondemand": True} if OLD else {"dataset": {"vae_cache_ondemand": True}}
    run = compare(
        workbench,
        plain_config(workbench, max_train_steps=EPOCH // world + 4, **keys),
        world=world,
        before=no_latents,
        probe=MODE,
    )
    for report in reports(run):
        assert report["vae-tiny-images"]["published"] > 0, "what a rank makes is taken in behind the run"
        assert report["vae-tiny-images"]["hits"] > 0, "and the second epoch hits it"
        assert report["vae-tiny-images"]["misses"] > 0, "what SimpleTuner had to make is no hit"
        assert report["vae-tiny-images"]["hit_rate"] < 1


@OLDEST_ALONE
def test_a_cache_that_is_rebuilt_every_epoch(workbench, world):
    keys = {"dataset": {"vae_cache_clear_each_epoch": True}, "max_train_steps": EPOCH // world + 3}
    # 3.1.6 by itself is not repeatable after a rebuild: its threads draw from the random numbers of the steps.
    steps = EPOCH // world if OLD or world > 1 else None
    # With two ranks its slower rank deletes files that the faster one has just made again: which ones is chance.
    config = plain_config(workbench, **keys)
    run = compare(workbench, config, world=world, probe=MODE, steps=steps, files=world == 1)
    assert sum(report["vae-tiny-images"]["published"] for report in reports(run)) > 24, "filled, dropped, made again"


@pytest.mark.one_release("4.")
def test_several_datasets_and_caption_dropout(workbench):
    def configure(blocks=None, **keys):
        images, embeds = dataset_list(workbench.project, {})
        changes = {"id": "more-images", "cache_dir_vae": images["cache_dir_vae"] + "-more", "crop_style": "corner"}
        second = {**images, **changes}
        workbench.configure(blocks=blocks, datasets=[images, second, embeds], caption_dropout_probability=0.5, **keys)

    def prepared(_blocks):
        """The second dataset's cache and index, from a run of their own: fresh latents are sampled."""
        configure(max_train_steps=1)
        filled = workbench.known(stock=True)
        assert filled.ok, filled.explain()
        workbench.go_on_from(filled)
        shutil.rmtree(workbench.project.output)

    run = compare(workbench, configure, before=prepared)
    (report,) = reports(run)
    assert report["vae-more-images"]["hits"] > 0
    assert report["vae-tiny-images"]["hits"] > 0


@OLDEST_ALONE
def test_a_run_that_is_resumed(workbench, world):
    def first_half(blocks):
        workbench.configure(blocks=blocks, max_train_steps=4, checkpoint_step_interval=2)
        first = workbench.train(stock=blocks is None, world=world)
        assert first.ok, first.explain()

    rest = plain_config(workbench, max_train_steps=7, checkpoint_step_interval=2)
    run = compare(workbench, rest, world=world, before=first_half)
    found = [report["vae-tiny-images"] for report in reports(run)]
    assert {one["packs"]["entries"] for one in found} == {24}, "the second start read the packs of the first"
    assert [one["misses"] for one in found] == [0] * world
    for path in run.folder.rglob("vae-*/*.pack"):
        with PackPlace.open(path.parent) as place:
            made_by = json.loads(place.pack(path.name).made_by)
        assert {"model_family", "pretrained_model_name_or_path", "dataset.resolution"} <= made_by.keys()


@pytest.mark.one_release("3.")
def test_a_latent_with_nan_ends_the_run_as_upstream_does(workbench):
    def poison(project):
        for path in (project.folder / "cache" / "vae").rglob("*.pt"):
            latent = load_file(str(path)).clone()
            latent[0, 0, 0] = float("nan")
            torch.save(latent, path)

    ends = []
    for stock in (True, False):
        workbench.restore()
        poison(workbench.project)
        workbench.configure(blocks=None if stock else UNIFIED)
        run = workbench.train(stock=stock)
        ends.append((run.losses, files_of(run.folder)))
        assert "NaN" in run.log(), run.explain()
    assert ends[0] == ends[1], "the same file is deleted, and no step is made"
    assert ends[0][0] == [[]]


@pytest.mark.one_release("4.")
def test_a_budget_that_holds_a_part(workbench):
    run = compare(
        workbench, plain_config(workbench, max_train_steps=EPOCH + 4), blocks=limited(memory_limit_gb=300_000 / 2**30)
    )
    (report,) = reports(run)
    text = report["text-tiny-text-embeds"]
    assert 0 < text["expected_hit_rate"] < 1
    assert text["bytes"] <= 300_000
    assert text["hits"] > 0
    assert 0 < text["misses_in_training"] <= text["misses"]
    assert "expected hit rate" in run.log()
    assert "would hold all" in run.log()


@pytest.mark.one_release("3.")
def test_lazy_fill_and_memory_only(workbench):
    run = compare(
        workbench,
        plain_config(workbench, max_train_steps=EPOCH + 4),
        blocks=limited(fill="lazy", persistent_cache=False),
    )
    (report,) = reports(run)
    assert report["vae-tiny-images"]["misses"] >= 24
    assert report["vae-tiny-images"]["published"] == 24, "what was asked for is taken in, some at a time"
    assert not (workbench.project.output / "gh200" / "cache").exists()


@pytest.mark.one_release("4.")
def test_the_bytes_of_a_batch_from_held_memory_to_model(workbench):
    workbench.configure(blocks=UNIFIED, max_train_steps=4)
    run = workbench.train(probe=probe("cache_bytes"))
    assert run.ok, run.explain()
    batches = run.records[0]["batches"]
    assert len(batches) == 4, json.dumps(run.records[0])[:500]
    for batch in batches:
        assert batch["equal"], batch
        assert batch["same_memory"], "assembled once, and that memory is what the model reads"
        assert batch["in_reused_buffer"], batch
        assert len(batch["ranges"]) == 2
        assert all(length == 1024 for _, _, length in batch["ranges"])
