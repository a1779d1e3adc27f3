"""Where the samples of a dataset are dealt to the ranks."""

from __future__ import annotations

from simpletuner_gh200.upstream.spec import SeamSpec

SPEC = SeamSpec(
    name="metadata.split_buckets",
    module="simpletuner.helpers.metadata.backends.base",
    qualname="MetadataBackend.split_buckets_between_processes",
    parameters=("self", "gradient_accumulation_steps", "apply_padding"),
    features=("store",),
    reason='each rank\'s own files are known then, which "per_node": "shard" stages; wrapped only where asked for',
    optional=True,
)
