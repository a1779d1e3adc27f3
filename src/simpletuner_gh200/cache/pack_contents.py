"""What the packs of a cache hold: which entries are alive, in which pack, and how much of each pack that is.

Dead is what nobody will want again: an entry whose source file is another now or gone, one that was found damaged,
and one that a newer pack has too. An entry that this run has no room for, or that another configuration made, is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOSTLY_DEAD = 0.5

Source = tuple[int, int]
"""A file in the words of a slot."""


@dataclass
class Loaded:
    """What became of the packs at start."""

    entries: int = 0
    bytes: int = 0
    changed: int = 0
    """Entries whose source file is another now, or gone."""
    damaged: int = 0
    left_out: int = 0
    """Entries that are fine, and that a newer pack has too or this run has no room for."""
    of_others: int = 0
    """Entries that another configuration made: another model, VAE, precision or resolution."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Held(NamedTuple):
    """An entry that is alive."""

    pack: str
    length: int
    source: Source
    """How its file looks."""


@dataclass
class PackUse:
    """One pack that can be read."""

    ours: bool
    """Made by the configuration of this run."""
    total: int = 0
    alive: int = 0
    entries: int = 0
    """Of those that are alive."""


@dataclass
class Contents:
    """Filled newest pack first; what is known holds for the very set of packs in ``names``."""

    names: dict[str, int] = field(default_factory=dict)
    """Every pack that was there, with its inode."""
    packs: dict[str, PackUse] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    """By path, of this configuration."""
    worthless: list[str] = field(default_factory=list)
    """Packs that can't be believed, or that no version reads any more."""

    def mine(self) -> dict[str, PackUse]:
        return {name: pack for name, pack in self.packs.items() if pack.ours}

    @property
    def alive(self) -> int:
        return sum(pack.alive for pack in self.mine().values())

    @property
    def mostly_dead(self) -> bool:
        total = sum(pack.total for pack in self.mine().values())
        return total > 0 and self.alive < total * (1 - MOSTLY_DEAD)

    def has(self, path: str, source: Source) -> bool:
        held = self.held.get(path)
        return held is not None and held.source == source

    def found(self, pack: str, path: str, length: int, source: Source | None) -> None:
        """An entry of a pack, while they are gone through; ``source`` None for one that is dead."""
        use = self.packs[pack]
        use.total += length
        if source is not None and path not in self.held:
            use.alive += length
            use.entries += 1
            self.held[path] = Held(pack, length, source)

    def written(self, pack: str, path: str, length: int, source: Source) -> None:
        """An entry of a new pack, which takes the place of any older one."""
        before = self.held.pop(path, None)
        if before is not None:
            self.packs[before.pack].alive -= before.length
            self.packs[before.pack].entries -= 1
        self.found(pack, path, length, source)
