"""How much of the caches a node holds: which entries, where not all fit, and in how many copies.

An epoch is a permutation, so a cache that forgets the least recently used entry forgets just what comes next. A fixed
subset of the entries hits at exactly its share, and since membership is a property of the key, all ranks agree on it,
restarts keep it, and entries that are made later know at once whether they belong.

A node with four GH200 has four CPU memories, each next to its own GPU. What lies in another's is read through the link
between the sockets; what lies in one's own is not. So there is one copy beside each GPU where there is room for that,
else one for all ranks. See ``docs/unified-caches.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simpletuner_gh200.cache.control import EVERYTHING
from simpletuner_gh200.memory.ceilings import node_allowance
from simpletuner_gh200.memory.numa import Node
from simpletuner_gh200.memory.sharing import NodeGroup
from simpletuner_gh200.units import counted, format_bytes

logger = logging.getLogger("simpletuner_gh200")


@dataclass(frozen=True)
class Selection:
    """Entries whose key's high half is at most ``threshold`` are kept."""

    threshold: int
    kept_entries: int
    kept_bytes: int
    total_entries: int
    total_bytes: int
    allowed: int | None

    @property
    def complete(self) -> bool:
        return self.kept_entries == self.total_entries

    @property
    def expected_hit_rate(self) -> float:
        return self.kept_entries / self.total_entries if self.total_entries else 1.0

    def text(self, name: str) -> str:
        """One log line for people."""
        held = (
            f"{self.kept_entries} of {counted(self.total_entries, 'entry', 'entries')}, {format_bytes(self.kept_bytes)}"
        )
        if self.complete:
            return f"{name}: all {held}"
        return (
            f"{name}: {held} fit the budget of {format_bytes(self.allowed or 0)}; expected hit rate "
            f"{self.expected_hit_rate:.1%}, the rest comes from disk. {format_bytes(self.total_bytes)} would hold all "
            f"(cache_config.memory_limit_gb)"
        )


def everything(count: int, size: int, allowed: int | None) -> Selection:
    return Selection(EVERYTHING, count, size, count, size, allowed)


def select(entries: Sequence[tuple[int, int]], allowed: int | None) -> Selection:
    """Choose among (key's high half, bytes). ``allowed`` None: everything."""
    total = sum(size for _, size in entries)
    if allowed is None or total <= allowed:
        return everything(len(entries), total, allowed)
    kept, used, threshold = 0, 0, 0
    for high, size in sorted(entries):
        if used + size > allowed:
            break
        kept, used, threshold = kept + 1, used + size, high
    return Selection(threshold, kept, used, len(entries), total, allowed)


@dataclass(frozen=True)
class Copies:
    """``groups``: the local ranks that share a copy, by copy."""

    groups: tuple[tuple[int, ...], ...]
    reason: str

    def of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.groups) if rank in ranks)

    def position(self, rank: int) -> tuple[int, int]:
        """Place of a rank among those that share its copy, and how many they are."""
        ranks = self.groups[self.of(rank)]
        return ranks.index(rank), len(ranks)


def decide(near: Sequence[int | None], needed: int | None, allowed: int, nodes: Sequence[Node]) -> Copies:
    """``near``: the memory node beside each local rank's GPU, None where it has none or a copy of its own is no use.

    ``needed``: bytes of one copy when it is complete, None where that can't be known yet.
    """
    everybody = (tuple(range(len(near))),)
    beside = sorted({node for node in near if node is not None})
    if None in near:
        return Copies(everybody, "one copy: not every rank has a memory node of its GPU to keep one in")
    if len(beside) < 2:
        return Copies(everybody, "one copy: the ranks are beside the same memory node")
    if needed is None:
        return Copies(everybody, "one copy: how large it will be is not known yet")
    if needed * len(beside) > allowed:
        return Copies(everybody, f"one copy: the budget has no room for {len(beside)} of {format_bytes(needed)}")
    room = {node.index: node_allowance(node.free) for node in nodes if node.has_cpus}
    full = [node for node in beside if room.get(node, 0) < needed]
    if full:
        return Copies(everybody, f"one copy: memory node {full[0]} has no room for {format_bytes(needed)}")
    groups = tuple(tuple(rank for rank, place in enumerate(near) if place == node) for node in beside)
    return Copies(groups, f"one copy beside each of memory nodes {', '.join(map(str, beside))}")


def agree(
    group: NodeGroup, near: int | None, needed: int | None, allowed: int, nodes: Callable[[], Sequence[Node]]
) -> Copies:
    """Collective: every rank says where its GPU is, the leader decides for all."""
    if group.local_world_size == 1:
        return decide([near], needed, allowed, ())
    if not group.is_leader:
        group.tell("memory node", note={"near": near})
        note, _ = group.receive("copies")
        groups, reason = note["groups"], note["reason"]
        assert isinstance(groups, list)
        return Copies(tuple(tuple(ranks) for ranks in groups), str(reason))
    told = [note.get("near") for note, _ in group.hear("memory node")]
    chosen = decide([near, *(one if isinstance(one, int) else None for one in told)], needed, allowed, nodes())
    group.share("copies", note={"groups": chosen.groups, "reason": chosen.reason})
    logger.info("gh200: unified caches: %s", chosen.reason)
    return chosen
