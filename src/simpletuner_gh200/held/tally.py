"""Counting from many threads without a lock, and what is counted per cache."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class Counting:
    """A number that goes up. Adding one is a single step of the interpreter; only reading takes a lock."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._reads = 0
        self._more = 0
        self._reading = threading.Lock()
        self.add = self._count.__next__

    def add_many(self, count: int) -> None:
        with self._reading:
            self._more += count

    @property
    def value(self) -> int:
        with self._reading:
            seen = next(self._count) - self._reads
            self._reads += 1
            return seen + self._more


@dataclass
class Statistics:
    """What one cache did in this process, and what its node holds."""

    hits: Counting = field(default_factory=Counting)
    misses: Counting = field(default_factory=Counting)
    """Entries that SimpleTuner read from its file, or made since there was none yet."""
    stale: Counting = field(default_factory=Counting)
    """Entries found changed on disk by someone else, counted among the misses too."""
    published: Counting = field(default_factory=Counting)
    batched: Counting = field(default_factory=Counting)
    """Hits that went straight into a batch, or were joined into one in reused memory."""
    fill_seconds: float = 0.0
    expected_hit_rate: float = 1.0
    staging_lead_seconds: float | None = None
    """How long before its use the last batch was on its way to the device; None without one. Named so in records, which
    people read, from when copies to the device were called staging."""
    _fallbacks: Counter[str] = field(default_factory=Counter)
    _declined: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fall_back(self, reason: str, count: int = 1) -> None:
        """So many values were left to SimpleTuner's own load."""
        with self._lock:
            self._fallbacks[reason] += count

    def miss(self, reason: str) -> None:
        """An entry that was asked for could not be handed out, and SimpleTuner reads its file."""
        self.misses.add()
        self.fall_back(reason)

    @property
    def fallbacks(self) -> dict[str, int]:
        with self._lock:
            return dict(self._fallbacks)

    def decline(self, reason: str) -> None:
        """A batch was left to SimpleTuner's own collate, which asks for its entries one by one."""
        with self._lock:
            self._declined[reason] += 1

    @property
    def declined(self) -> dict[str, int]:
        with self._lock:
            return dict(self._declined)

    @property
    def hit_rate(self) -> float | None:
        hits, misses = self.hits.value, self.misses.value
        return hits / (hits + misses) if hits + misses else None

    def report(self, *, entries: int, held: int) -> dict[str, Any]:
        rate = self.hit_rate
        return {
            "entries": entries,
            "bytes": held,
            "hits": self.hits.value,
            "misses": self.misses.value,
            "hit_rate": round(rate, 6) if rate is not None else None,
            "expected_hit_rate": round(self.expected_hit_rate, 6),
            "batched": self.batched.value,
            "declined_batches": self.declined,
            "stale": self.stale.value,
            "published": self.published.value,
            "fallbacks": self.fallbacks,
            "fill_seconds": round(self.fill_seconds, 3),
            "staging_lead_seconds": self.staging_lead_seconds,
        }
