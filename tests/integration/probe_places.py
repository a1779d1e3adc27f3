"""Which images each rank takes, and how many of its epoch it knows to be done once a checkpoint is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def install(record: dict[str, Any]) -> None:
    from simpletuner.helpers.metadata.backends.base import MetadataBackend
    from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler

    record.update(taken=[], known_after_loading=[])
    mark, load = MetadataBackend.mark_batch_as_seen, MultiAspectSampler.load_states

    def watched_mark(self: Any, paths: list[str]) -> Any:
        record["taken"].append([Path(path).name for path in paths])
        return mark(self, paths)

    def watched_load(self: Any, state_path: str) -> Any:
        result = load(self, state_path)
        record["known_after_loading"].append(len(self.metadata_backend.seen_images))
        return result

    MetadataBackend.mark_batch_as_seen, MultiAspectSampler.load_states = watched_mark, watched_load
