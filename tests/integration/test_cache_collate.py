"""SimpleTuner's own collate over entries of every form, with and without our tables: the same batch, to the bit."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
pytest.importorskip("simpletuner.helpers.training.collate")

from simpletuner.helpers.training import collate

from simpletuner_gh200.bench import cache_simpletuner as harness
from simpletuner_gh200.held.caches import Wanted, opened

LATENTS = {
    "image": lambda n: torch.randn(4, 8, 8),
    "image, channels last": lambda n: torch.randn(8, 8, 4).permute(2, 0, 1),
    "video": lambda n: torch.randn(16, 5, 8, 8).to(torch.bfloat16),
    "video with a batch dimension": lambda n: torch.randn(1, 5, 16, 8, 8),
    "audio": lambda n: {
        "latents": torch.randn(8, 100),
        "latent_lengths": torch.tensor(90 + n),
        "lyrics": f"words of song {n}",
        "segments": [[0, n], [n, 100], {"mask": torch.ones(3, dtype=torch.bool)}],
        "nothing": None,
    },
    "a large one": lambda n: torch.randn(16, 128, 128),
}

EMBEDS = {
    "plain": lambda n: {"prompt_embeds": torch.randn(1, 77, 32), "pooled_prompt_embeds": torch.randn(1, 32)},
    "masks": lambda n: {
        "prompt_embeds": torch.randn(1, 20, 32),
        "prompt_attention_mask": torch.ones(1, 20, dtype=torch.int64),
        "time_ids": torch.randn(1, 6),
    },
    "two-dimensional": lambda n: {"prompt_embeds": torch.randn(20, 32), "attention_masks": torch.ones(20)},
    "with grad": lambda n: {"prompt_embeds": torch.randn(1, 20, 32).requires_grad_(n == 1)},
    "a large one": lambda n: {"prompt_embeds": torch.randn(1, 512, 512), "pooled_prompt_embeds": torch.randn(1, 768)},
}


def same(left, right):
    if isinstance(left, torch.Tensor):
        alike = (left.dtype, left.shape, left.stride(), left.requires_grad)
        return alike == (right.dtype, right.shape, right.stride(), right.requires_grad) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


def examples_over(folder, vae, text, latent, embed):
    examples = []
    for n in range(harness.BATCH):
        image, caption = str(folder / "images" / f"{n}.png"), f"caption {n}" if n else ""
        torch.save(latent(n), vae.generate_vae_cache_filename(image)[0])
        torch.save(embed(n), text.hash_prompt_with_path({"prompt": caption, "key": caption, "metadata": {}}))
        examples.append(
            {
                "image_path": image,
                "data_backend_id": harness.DATASET,
                "instance_prompt_text": caption,
                "aspect_ratio": 1.0,
                "luminance": 0.5,
                "original_size": (64, 64),
                "crop_coordinates": (0, 0),
            }
        )
    return examples


def batches(tmp_path, latent, embed, join=None):
    """(plain, ours, tables' reports) of one batch. ``join``: how the model joins embeds itself."""
    with harness._pinning_stand_in():
        vae, text = harness._caches(tmp_path)
        if join is not None:
            collate.StateTracker.get_model().collate_prompt_embeds = join
        examples = examples_over(tmp_path, vae, text, latent, embed)
        wanted = [Wanted("vae", "vae", vae.cache_dir, look_for_nan=True), Wanted("text", "text", text.cache_dir)]
        with opened(wanted) as caches:
            plain = collate.collate_fn(next(harness._batches(examples, 0)))
            with harness._served(vae, text, caches):
                ours = [collate.collate_fn(next(harness._batches(examples, 0))) for _ in range(3)][-1]
            return plain, ours, {name: cache.report() for name, cache in caches.items()}


@pytest.mark.parametrize("kind", LATENTS)
def test_latents_of_every_form(tmp_path, kind):
    plain, ours, reports = batches(tmp_path, LATENTS[kind], EMBEDS["plain"])
    assert same(plain["latent_batch"], ours["latent_batch"])
    assert same(plain["latent_metadata"], ours["latent_metadata"])
    assert same(plain, ours)
    assert reports["vae"]["batched"] == 3 * harness.BATCH
    assert reports["vae"]["fallbacks"] == {}


@pytest.mark.parametrize("kind", EMBEDS)
def test_embeds_of_every_form_and_an_empty_caption(tmp_path, kind):
    plain, ours, reports = batches(tmp_path, LATENTS["image"], EMBEDS[kind])
    assert same(plain, ours)
    assert reports["text"]["hits"] == 3 * harness.BATCH
    assert reports["text"]["misses"] == 0


def test_a_model_that_joins_embeds_itself_keeps_doing_so(tmp_path):
    def join(outputs):
        return {"prompt_embeds": torch.cat([output["prompt_embeds"] * 2 for output in outputs])}

    plain, ours, _ = batches(tmp_path, LATENTS["image"], EMBEDS["plain"], join)
    assert same(plain, ours)
    assert "pooled_prompt_embeds" not in ours["text_encoder_output"]


def test_latents_of_different_shapes_fail_as_upstream_does(tmp_path):
    with pytest.raises(ValueError, match="shape mismatch"):
        batches(tmp_path, lambda n: torch.randn(4, 8, 8 + n % 2), EMBEDS["plain"])


def test_samples_of_different_aspects_fail_although_their_latents_are_alike(tmp_path):
    with harness._pinning_stand_in():
        vae, text = harness._caches(tmp_path)
        examples = examples_over(tmp_path, vae, text, LATENTS["image"], EMBEDS["plain"])
        examples[3]["aspect_ratio"] = 2.0
        wanted = [Wanted("vae", "vae", vae.cache_dir, look_for_nan=True), Wanted("text", "text", text.cache_dir)]
        with (
            opened(wanted) as caches,
            harness._served(vae, text, caches),
            pytest.raises(ValueError, match="Aspect ratio"),
        ):
            collate.collate_fn(next(harness._batches(examples, 0)))
