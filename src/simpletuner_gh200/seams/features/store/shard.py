"""``per_node: shard``: a node stages what its own ranks were dealt, once SimpleTuner has dealt.

Which files a rank reads is known when its metadata backend has split the buckets between the processes. Until then,
the scan of the whole dataset included, files are read from disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from simpletuner_gh200.memory.mapping import create_memfd
from simpletuner_gh200.memory.sharing import NodeGroup


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
