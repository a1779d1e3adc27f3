"""``per_node: shard``: a node stages what its own ranks were dealt, once SimpleTuner has dealt.

Which files a rank reads is known when its metadata backend has split the buckets between the processes. Until then,
the scan of the whole dataset included, files are read from disk.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from simpletuner_gh200.memory.mapping import create_memfd
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.seams.patch import Patch, wrap_method
from simpletuner_gh200.seams.seam import verify
from simpletuner_gh200.upstream.contract.metadata_split_buckets import SPEC


def node_count(environment: dict[str, str] | os._Environ[str]) -> int:
    """How many nodes the launcher spread the run over."""
    world, local = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "1")
    return -(-int(world) // int(local)) if world.isdigit() and local.isdigit() and int(local) else 1


class SplitWatch:
    """Tells who asked when a dataset was first dealt to the ranks. Wraps upstream's method only while it is used."""

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[Any], None]] = {}
        self._patch: Patch | None = None

    def once(self, dataset: str, on_split: Callable[[Any], None]) -> None:
        """Call ``on_split(metadata_backend)`` after the first split of ``dataset``; later deals find the disk."""
        self._waiting[dataset] = on_split
        if self._patch is None:
            module = importlib.import_module(SPEC.module)
            verify(SPEC, module)
            self._patch = wrap_method(module.MetadataBackend, "split_buckets_between_processes", self._split)
            self._patch.install()

    def still_waiting(self) -> list[str]:
        return sorted(self._waiting)

    def stop(self) -> None:
        self._waiting.clear()
        if self._patch is not None:
            self._patch.uninstall()
            self._patch = None

    def _split(self, wrapped: Callable[..., Any], metadata: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        on_split = self._waiting.pop(str(metadata.id), None)
        if on_split is not None:
            on_split(metadata)
        return result


def dealt_stems(metadata: Any) -> set[bytes]:
    """Paths of this rank's samples without their extension: captions and masks share them."""
    buckets: dict[str, list[str]] = metadata.aspect_ratio_bucket_indices
    return {stem(os.fsencode(os.path.abspath(path))) for paths in buckets.values() for path in paths}


def stem(path: bytes) -> bytes:
    return os.path.splitext(path)[0]


def gather_stems(group: NodeGroup, name: str, mine: Iterable[bytes]) -> set[bytes]:
    """Leader: the stems of all ranks of the node. Others: nothing, after telling theirs."""
    if not group.is_leader:
        fd = create_memfd("stems")
        with os.fdopen(fd, "wb") as file:
            file.write(b"\0".join(mine))
            file.flush()
            group.tell(name, fd)
        return set()
    found = set(mine)
    for _note, (fd,) in group.hear(name):
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            found.update(file.read().split(b"\0"))
    found.discard(b"")
    return found
