"""SimpleTuner's caches, and its batches: how an entry is read, where one is made anew, where samples are joined."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.facts import calls, contains, mentions, methods
from simpletuner_gh200.upstream.spec import fact, seam

CACHING = "simpletuner.helpers.caching"
COLLATE = "simpletuner.helpers.training.collate"
SERVED = "hits are served by replacing methods on the backend instance behind the cache"
BY_NAME = "collate_fn looks it up by name"
"""So that a replaced module global is the one that is called."""

STACK = "torch.stack([_latent.to(StateTracker.get_accelerator().device) for _latent in latents], dim=0)"


def _only_looks(scope: ast.AST) -> str | None:
    attributes = [node for node in syntax.nodes(scope) if isinstance(node, ast.Attribute)]
    taken = {node.attr for node in attributes if syntax.dotted(node.value) in ("latent", "_latent")}
    others = sorted(taken - {"shape", "to"})
    return f"{', '.join(others)} of a latent" if others else None


SPECS = (
    seam(
        "caching.vae_read",
        f"{CACHING}.vae:VAECache._read_from_storage",
        f"caches: {SERVED}",
        fact("torch_load is looked up on the instance", calls("self.cache_data_backend.torch_load", arguments=1)),
        fact("existence too", calls("self.cache_data_backend.exists", arguments=1), "VAECache.encode_images"),
        # No other way leads from a file name to its latent.
        fact("reading goes through encode_images", calls("self.encode_images"), "VAECache.retrieve_from_cache"),
        # A batch's latents are found by the names of their cache files.
        fact("batch_path: names a sample's file", methods("generate_vae_cache_filename(self, filepath)"), "VAECache"),
    ),
    seam(
        "caching.vae_rebuild",
        f"{CACHING}.vae:VAECache.rebuild_cache(self)",
        "caches: entries of that cache are dropped first, on every rank, so that no stale latent is served",
    ),
    seam(
        "caching.vae_pass",
        f"{CACHING}.vae:VAECache.process_buckets",
        "caching: while it runs, workers prepare pictures ahead of it, and latents are written behind it",
        # Where that order comes from, and which ends of its stages are replaced on the instance and in the module.
        fact("the order of buckets is shuffled by name", calls("shuffle", arguments=1)),
        fact("what a bucket needs is asked of the instance", calls("self._reduce_bucket", arguments=3)),
        fact(
            "pictures are read by the backend",
            calls("self.image_data_backend.read_image_batch", arguments=2),
            "VAECache.read_images_in_batch",
        ),
        fact(
            "pictures are grouped by the batch processor",
            calls("self.batch_processor.process_aspect_grouped_images", times=1, arguments=2),
            "VAECache._process_images_in_batch",
        ),
        fact(
            "pictures are prepared by name",
            contains(
                "prepare_sample(image=prepared_input, data_backend_id=self.id, filepath=filepath, model=self.model)"
            ),
            "VAECache._process_images_in_batch",
        ),
        fact(
            "pictures are transformed last",
            contains("self.transform_sample(image).to(self.accelerator.device, dtype=self.vae.dtype)"),
            "VAECache._process_images_in_batch",
        ),
        fact(
            "latents are written by the backend",
            calls("self.cache_data_backend.write_batch", arguments=2),
            "VAECache._write_latents_in_batch",
        ),
    ),
    seam(
        "caching.prepare_sample",
        f"{CACHING}.vae:prepare_sample(image, data_backend_id, filepath, model)",
        "caching: a worker prepares a sample by the two ways that it has",
        fact("by itself", calls("training_sample.prepare", arguments=0)),
        fact("like its partner", calls("training_sample.prepare_like", times=1, arguments=1)),
    ),
    seam(
        "caching.text_retrieve",
        f"{CACHING}.text_embeds:TextEmbeddingCache.load_from_cache",
        f"caches: {SERVED}",
        fact("torch_load is looked up on the instance", calls("self.data_backend.torch_load", arguments=1)),
        # What is written is known to our cache at once.
        fact("torch_save too", mentions("self.data_backend.torch_save"), "TextEmbeddingCache.process_write_batch"),
    ),
    seam(
        "caching.image_embed_read",
        f"{CACHING}.image_embed:ImageEmbedCache.retrieve_from_cache",
        f"caches: {SERVED}",
        fact("torch_load is looked up on the instance", calls("self.cache_data_backend.torch_load", arguments=1)),
        fact("existence too", calls("self.cache_data_backend.exists", arguments=1)),
    ),
    seam(
        "collate.compute_latents",
        f"{COLLATE}:compute_latents(filepaths, data_backend_id, model)",
        "batch_path: a batch's latents come straight from the slab",
        fact(BY_NAME, calls("compute_latents", arguments=3), "collate_fn"),
    ),
    seam(
        "collate.check_latent_shapes",
        f"{COLLATE}:check_latent_shapes(latents, filepaths, data_backend_id, batch, is_conditioning)",
        "batch_path: a batch that was assembled in place is not stacked a second time",
        fact(BY_NAME, calls("check_latent_shapes"), "collate_fn"),
        # That is what a batch assembled in place already is.
        fact("stacks them on the device", contains(STACK)),
        # Stand-ins can go through the checks of the samples in their place.
        fact("only looks at shapes and values", _only_looks),
    ),
    seam(
        "collate.fetch_latent",
        f"{COLLATE}:fetch_latent(fp, data_backend_id)",
        "batch_path: a latent that is pinned already is not pinned again",
        fact("compute_latents looks it up by name", mentions("fetch_latent"), "compute_latents"),
        # Which is where our hits are served.
        fact("asks the VAE cache of the dataset", calls("StateTracker.get_vaecache")),
    ),
)
