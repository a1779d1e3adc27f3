"""SimpleTuner's own caches and collate, entered from the top, with and without our caches behind them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simpletuner_gh200.bench.suite import measure
from simpletuner_gh200.held.batch import assemble
from simpletuner_gh200.held.buffers import BufferPool
from simpletuner_gh200.held.cache import HeldCache
from simpletuner_gh200.held.caches import Wanted, opened

BATCH = 8
EPOCHS = 3
DATASET, TEXT = "bench", "bench-text"


def measure_simpletuner(folder: Path, samples: int, repeats: int) -> dict[str, Any]:
    """``samples`` of 512 KB latents and 4 MB text embeds; wall time of ``EPOCHS`` epochs of ``collate_fn``."""
    os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
    with _pinning_stand_in():
        vae, text = _caches(folder)
        examples = _fill_caches(folder, vae, text, samples)
        wanted = [
            Wanted("vae", "vae", vae.cache_dir, look_for_nan=True),
            Wanted("text", "text", text.cache_dir),
        ]
        with opened(wanted) as caches:
            _same_batches(examples, vae, text, caches)

            def ours() -> None:
                with _served(vae, text, caches):
                    _epochs(examples)

            seconds = measure({"plain": lambda: _epochs(examples), "ours": ours}, repeats=repeats).wall
    return {"samples_per_s_vs_plain": seconds["plain"] / seconds["ours"]}


def _caches(folder: Path) -> tuple[Any, Any]:
    """SimpleTuner's VAE and text caches over local backends, and the state that collate reads."""
    import torch
    from simpletuner.helpers.caching.text_embeds import TextEmbeddingCache
    from simpletuner.helpers.caching.vae import VAECache
    from simpletuner.helpers.data_backend.local import LocalDataBackend
    from simpletuner.helpers.models.common import TextEmbedCacheKey
    from simpletuner.helpers.training.state_tracker import StateTracker

    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True, num_processes=1, process_index=0)
    # As much of a model as the caches and collate need: one that leaves joining to upstream's default.
    model = SimpleNamespace(
        get_transforms=lambda dataset_type: None,
        text_embed_cache_key=lambda: TextEmbedCacheKey.CAPTION,
        unpack_text_embeddings_from_cache=lambda embeddings: embeddings,
        collate_prompt_embeds=lambda _outputs: {},
        uses_text_embeddings_cache=lambda: True,
        requires_conditioning_image_embeds=lambda: False,
        requires_text_embed_image_context=lambda: False,
    )
    StateTracker.set_args(
        SimpleNamespace(
            caption_dropout_probability=0.0,
            controlnet=False,
            model_family="flux",
            vae_cache_ondemand=False,
            conditioning_multidataset_sampling="random",
        )
    )
    StateTracker.set_accelerator(accelerator)
    StateTracker.set_model(model)
    StateTracker.model_type = "flux"
    StateTracker.weight_dtype = torch.bfloat16
    images, files = LocalDataBackend(accelerator, DATASET), LocalDataBackend(accelerator, TEXT)
    vae = VAECache(
        id=DATASET,
        model=model,
        vae=None,
        accelerator=accelerator,
        metadata_backend=None,
        instance_data_dir=str(folder / "images"),
        image_data_backend=images,
        cache_data_backend=LocalDataBackend(accelerator, "bench-vae"),
        cache_dir=str(folder / "vae"),
    )
    text = TextEmbeddingCache(
        TEXT, files, [], [], accelerator, cache_dir=str(folder / "text"), model_type="flux", model=model
    )
    text.webhook_handler = None
    StateTracker.default_text_embed_cache = text
    StateTracker.data_backends = {
        DATASET: {
            "id": DATASET,
            "data_backend": images,
            "vaecache": vae,
            "text_embed_cache": text,
            "config": {"instance_data_dir": str(folder / "images"), "dataset_type": "image"},
        }
    }
    return vae, text


def _fill_caches(folder: Path, vae: Any, text: Any, samples: int) -> list[dict[str, Any]]:
    """Cache files under the names SimpleTuner gives them; the examples that a sampler would yield."""
    import torch

    latents = torch.randn(samples + 16, 128, 128).to(torch.bfloat16)
    embeds = torch.randn(512 + samples, 4096).to(torch.bfloat16)
    examples = []
    for number in range(samples):
        image, caption = str(folder / "images" / f"{number:05d}.png"), f"caption number {number}"
        torch.save(latents[number : number + 16].clone(), vae.generate_vae_cache_filename(image)[0])
        embed = {
            "prompt_embeds": embeds[number : number + 512].clone().unsqueeze(0),
            "pooled_prompt_embeds": torch.randn(1, 768).to(torch.bfloat16),
        }
        torch.save(embed, text.hash_prompt_with_path({"prompt": caption, "key": caption, "metadata": {}}))
        example = {"image_path": image, "data_backend_id": DATASET, "instance_prompt_text": caption}
        shape = {"aspect_ratio": 1.0, "original_size": (1024, 1024), "crop_coordinates": (0, 0)}
        examples.append({**example, **shape, "luminance": 0.5})
    return examples


def _batches(examples: list[dict[str, Any]], epoch: int) -> Iterator[list[dict[str, Any]]]:
    order = random.Random(epoch).sample(examples, len(examples))
    for at in range(0, len(order), BATCH):
        yield [{"training_samples": [dict(example) for example in order[at : at + BATCH]], "conditioning_samples": []}]


def _epochs(examples: list[dict[str, Any]]) -> None:
    from simpletuner.helpers.training import collate

    for epoch in range(EPOCHS):
        for batch in _batches(examples, epoch):
            collate.collate_fn(batch)


def _same_batches(examples: list[dict[str, Any]], vae: Any, text: Any, caches: Any) -> None:
    """A fast wrong answer is no answer: one batch each way, compared to the bit."""
    import torch
    from simpletuner.helpers.training import collate

    plain = collate.collate_fn(next(_batches(examples, 0)))
    with _served(vae, text, caches):
        ours = collate.collate_fn(next(_batches(examples, 0)))
    for key in ("latent_batch", "prompt_embeds", "add_text_embeds"):
        assert torch.equal(plain[key], ours[key]), key


def _served(vae: Any, text: Any, caches: Mapping[str, HeldCache]) -> AbstractContextManager[None]:
    """Our caches and our batch path in place, as the extension puts them, and taken out again."""
    from simpletuner.helpers.training import collate

    from simpletuner_gh200.seams.features.caches.backends import Route, ServedBackend
    from simpletuner_gh200.seams.features.caches.batch_path import BatchPath
    from simpletuner_gh200.seams.points.caching import SEAMS

    path = BatchPath(collate, {DATASET: caches["vae"]}, partial(assemble, pool=BufferPool()))
    runtime: Any = SimpleNamespace(batch_path=path)
    return _patched(
        *ServedBackend(vae.cache_data_backend, [Route(vae.cache_dir, caches["vae"])]).patches,
        *ServedBackend(text.data_backend, [Route(text.cache_dir, caches["text"])]).patches,
        *(patch for seam in SEAMS if "collate." in seam.name for patch in seam.patches(collate, runtime)),
    )


def _pinning_stand_in() -> AbstractContextManager[None]:
    """Without CUDA nothing can be pinned: both sides skip it, by the seam that does so in a run."""
    import torch

    from simpletuner_gh200.seams.points.torch import SEAMS

    runtime: Any = None
    return _patched(*(patch for seam in SEAMS for patch in seam.patches(torch, runtime)))


@contextmanager
def _patched(*found: Any) -> Iterator[None]:
    from simpletuner_gh200.seams.patch import Patches

    patches = Patches()
    patches.install(*found)
    try:
        yield
    finally:
        patches.uninstall()
