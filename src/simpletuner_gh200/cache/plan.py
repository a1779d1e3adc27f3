"""What is kept when not everything fits: a fixed subset, chosen by the key alone.

An epoch is a permutation, so a cache that forgets the least recently used entry forgets just what comes next. A fixed
subset of the entries hits at exactly its share, and since membership is a property of the key, all ranks agree on it,
restarts keep it, and entries that are made later know at once whether they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simpletuner_gh200.cache.control import EVERYTHING
from simpletuner_gh200.units import format_bytes


@dataclass(frozen=True)
class Plan:
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
        held = f"{self.kept_entries} of {self.total_entries} entries, {format_bytes(self.kept_bytes)}"
        if self.complete:
            return f"{name}: all {held}"
        return (
            f"{name}: {held} fit the budget of {format_bytes(self.allowed or 0)}; expected hit rate "
            f"{self.expected_hit_rate:.1%}, the rest comes from disk. {format_bytes(self.total_bytes)} would hold all "
            f"(cache_config.memory_limit_gb)"
        )


def plan(entries: Sequence[tuple[int, int]], allowed: int | None) -> Plan:
    """Choose among (key's high half, bytes). ``allowed`` None: everything."""
    total = sum(size for _, size in entries)
    if allowed is None or total <= allowed:
        return Plan(EVERYTHING, len(entries), total, len(entries), total, allowed)
    kept, used, threshold = 0, 0, 0
    for high, size in sorted(entries):
        if used + size > allowed:
            break
        kept, used, threshold = kept + 1, used + size, high
    return Plan(threshold, kept, used, len(entries), total, allowed)


def divide(needs: Mapping[str, tuple[int, int]], allowed: int | None) -> dict[str, int | None]:
    """Share a budget among caches: name -> (entries, bytes) becomes name -> bytes.

    A hit saves an open and an unpickle whatever its size, so caches with small entries come first.
    """
    if allowed is None:
        return dict.fromkeys(needs, None)
    shares: dict[str, int | None] = {}
    left = allowed
    for name, (_entries, size) in sorted(needs.items(), key=lambda item: (item[1][1] / max(item[1][0], 1), item[0])):
        shares[name] = min(size, left)
        left -= min(size, left)
    # What is over is room to grow, the same for each.
    extra = left // max(len(needs), 1)
    return {name: (share or 0) + extra for name, share in shares.items()}
