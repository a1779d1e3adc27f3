"""The descriptors that make up a staged dataset, and how they travel from the rank that staged to the others."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from simpletuner_gh200.memory.mapping import SIZE_SEALS, create_memfd
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.store.index import Rows, write_index


@dataclass(frozen=True)
class StagedMemory:
    """Owned descriptors: contents and index sealed, ``state`` one writable byte per file."""

    data: int
    index: int
    state: int
    count: int
    aliases: tuple[tuple[bytes, bytes], ...] = ()

    def close(self) -> None:
        """Close the descriptors; mappings made from them live on."""
        for fd in (self.data, self.index, self.state):
            os.close(fd)


def new_state(count: int) -> int:
    """One zero byte per file: staged content is current. Any rank may set a byte; see ``reader.STALE``."""
    return create_memfd("state", max(count, 1), SIZE_SEALS)


def nothing_staged() -> StagedMemory:
    """A dataset of no files: everything is read from disk."""
    return StagedMemory(data=create_memfd("dataset"), index=write_index(Rows.new(0)), state=new_state(0), count=0)


def share_memory(group: NodeGroup, name: str, memory: StagedMemory) -> None:
    """Leader: hand the dataset to the other ranks of the node."""
    aliases = create_memfd("aliases")
    text = json.dumps([[os.fsdecode(part) for part in pair] for pair in memory.aliases])
    os.write(aliases, text.encode())
    group.share(name, memory.data, memory.index, memory.state, aliases, note={"count": memory.count})
    os.close(aliases)


def receive_memory(group: NodeGroup, name: str) -> StagedMemory:
    """Others: the dataset that local rank 0 staged, as soon as it is there."""
    note, (data, index, state, aliases) = group.receive(name)
    text = os.pread(aliases, os.fstat(aliases).st_size, 0)
    os.close(aliases)
    pairs = tuple((os.fsencode(other), os.fsencode(staged)) for other, staged in json.loads(text))
    count = note["count"]
    assert isinstance(count, int)
    return StagedMemory(data=data, index=index, state=state, count=count, aliases=pairs)
