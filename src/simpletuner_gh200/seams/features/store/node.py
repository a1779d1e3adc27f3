"""What the ranks of a node know of each other's data sets, and which samples each node has.

Which files a rank reads is known when its metadata backend has split the buckets between the processes. Until then,
the scan of the whole data set included, files are read from disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from simpletuner_gh200.held.files import Forgotten
from simpletuner_gh200.memory.mapping import SIZE_SEALS, create_memfd, map_shared
from simpletuner_gh200.memory.sharing import NodeGroup

_NOTES = 4096
"""Bytes before those of what is forgotten: two words, the length of a message, and its text."""


class NodeNotes:
    """In memory that the ranks share: files that were written, bytes still to come, and where all of them end.

    The leader writes the last two. Nobody waits for anybody.
    """

    def __init__(self, group: NodeGroup) -> None:
        """Collective."""
        self.group = group
        if group.is_leader:
            fd = create_memfd("notes", _NOTES + Forgotten.BYTES, SIZE_SEALS)
            group.share("notes", fd)
        else:
            _, (fd,) = group.receive("notes")
        mapped = map_shared(fd)
        os.close(fd)
        assert mapped is not None
        memory = memoryview(mapped)
        self._words, self._text = memory[:24].cast("Q"), memory[24:_NOTES]
        self.forgotten = Forgotten(memory[_NOTES:])

    @property
    def to_come(self) -> int:
        """Bytes that data sets on their way will take."""
        return int(self._words[0])

    def promise(self, size: int) -> None:
        self._words[0] = size

    def failure(self, step: int, mine: str | None) -> str | None:
        """Why this rank has to end at ``step``, if it has. Asked before each batch; ``mine`` counts in the leader only.

        The leader names the step after its own. No rank gets past a step that the leader has not finished, since
        gradients are shared there: so whoever comes to the named one knows of it.
        """
        if mine is not None and self.group.is_leader and not self._words[1]:
            text = mine.encode("utf-8", "replace")[: len(self._text)]
            self._text[: len(text)] = text
            self._words[2], self._words[1] = len(text), step + 1
        if not self._words[1] or step < self._words[1]:
            return None
        return str(self._text[: self._words[2]], "utf-8", "replace")


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
