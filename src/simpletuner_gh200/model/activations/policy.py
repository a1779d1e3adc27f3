"""Where each block's saved tensors go: keep in HBM, offload to Grace, or recompute; and is it worth it. Pure.

>>> blocks = [Block(saved=2 * GIB, inputs=32 * MIB, work=3e12) for _ in range(57)]
>>> mix = choose(blocks, hbm_room=40 * GIB, grace_limit=200 * GIB, rates=Rates(d2h=290e9, h2d=370e9, work=400e12))
>>> mix.choices, mix.exposed_seconds, mix.why

What leaves HBM is taken from the front: the first blocks of the forward pass have the longest time to go, and the
longest to come back. What the link can't hide is weighed, block by block, against computing it again.

Where ``auto`` could also leave all of it to checkpointing, ``Comparison`` takes a few steps each way, and what was
faster stays. Steps of different shapes are never compared: each shape has its own times, and its vote counts by how
often it came. The two ways take turns, so that what slows the machine for a while slows both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal, get_args

from simpletuner_gh200.units import format_bytes, format_seconds

Choice = Literal["keep", "offload", "recompute"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

BACKWARD_WORK = 2.0
"""A backward pass computes about twice what its forward pass did: a gradient for inputs and one for weights."""


@dataclass(frozen=True)
class Block:
    """A stretch of the forward pass that is treated as one."""

    saved: int
    """Bytes that autograd keeps for it."""
    work: float
    """Of its forward pass: FLOPs, or measured seconds, as long as ``Rates.work`` is in the same unit."""
    inputs: int = 0
    """Bytes that stay when it is recomputed."""
    recomputable: bool = True


@dataclass(frozen=True)
class Rates:
    """Bytes per second each way, never assumed equal, and work per second (1.0 where work is measured in seconds)."""

    d2h: float
    h2d: float
    work: float = 1.0


@dataclass(frozen=True)
class Mix:
    """A choice for each block, and what it costs. ``fits`` is false where HBM holds more than its room even so."""

    choices: tuple[Choice, ...]
    kept: int
    offloaded: int
    recomputed: int
    """Bytes that are not saved at all, because they are computed again."""
    exposed_seconds: float
    """Per step: what the link needs beyond what computation hides."""
    recompute_seconds: float
    fits: bool
    why: str

    def counts(self) -> dict[Choice, int]:
        return counted(self.choices)


def counted(choices: Sequence[Choice]) -> dict[Choice, int]:
    return {choice: choices.count(choice) for choice in CHOICES}


def choose(blocks: Sequence[Block], *, hbm_room: int, grace_limit: int, rates: Rates | None) -> Mix:
    """The mix for one step. ``rates`` None: nothing is known to limit the link, so it never does."""
    chooser = _Chooser(blocks, hbm_room, grace_limit, rates)
    chooser.offload_what_is_hidden()
    hidden = chooser.over <= 0
    chooser.pay_for_the_rest()
    return chooser.mix(hidden)


class _Chooser:
    def __init__(self, blocks: Sequence[Block], hbm_room: int, grace: int, rates: Rates | None) -> None:
        self.blocks = blocks
        self.hbm_room = hbm_room
        self.grace = grace
        self.unlimited = rates is None
        rates = rates or Rates(inf, inf)
        self.seconds = [block.work / rates.work for block in blocks]
        self.out = [block.saved / rates.d2h for block in blocks]
        self.back = [block.saved / rates.h2d for block in blocks]
        self.choices: list[Choice] = ["keep"] * len(blocks)
        self.saved = sum(block.saved for block in blocks)
        self.over = self.saved - hbm_room
        self.exposed = self.recomputing = 0.0

    def offload_what_is_hidden(self) -> None:
        """From the front, whatever is gone by the end of the forward pass and back before its own backward pass."""
        forward_end = sum(self.seconds)
        sent = now = 0.0
        slack = inf
        for index, block in enumerate(self.blocks):
            now += self.seconds[index]
            if self.over <= 0:
                return
            if not block.saved or block.saved > self.grace:
                continue
            going = max(sent, now) + self.out[index]
            room = min(slack, BACKWARD_WORK * (forward_end - now)) - self.back[index]
            if self.unlimited or (going <= forward_end and room >= 0):
                self._offload(index)
                sent, slack = going, room

    def pay_for_the_rest(self) -> None:
        """What the link can't hide: waited for or computed again, whichever costs less for each byte that it frees."""
        kept = [index for index, choice in enumerate(self.choices) if choice == "keep"]
        offers = sorted(offer for at in kept for offer in self._offers(at))
        for _price, index, choice in offers:
            block = self.blocks[index]
            if self.over <= 0:
                return
            if self.choices[index] != "keep":
                continue
            if choice == "recompute":
                self.choices[index] = "recompute"
                self.over -= block.saved - block.inputs
                self.recomputing += self.seconds[index]
            elif block.saved <= self.grace:
                self._offload(index)
                self.exposed += self.out[index] + self.back[index]

    def _offers(self, index: int) -> Iterable[tuple[float, int, Choice]]:
        block = self.blocks[index]
        if block.saved:
            yield (self.out[index] + self.back[index]) / block.saved, index, "offload"
        if block.recomputable and block.saved > block.inputs:
            yield self.seconds[index] / (block.saved - block.inputs), index, "recompute"

    def _offload(self, index: int) -> None:
        self.choices[index] = "offload"
        self.grace -= self.blocks[index].saved
        self.over -= self.blocks[index].saved

    def mix(self, hidden: bool) -> Mix:
        chosen = list(zip(self.blocks, self.choices, strict=True))
        offloaded = sum(block.saved for block, choice in chosen if choice == "offload")
        recomputed = sum(block.saved - block.inputs for block, choice in chosen if choice == "recompute")
        return Mix(
            choices=tuple(self.choices),
            kept=self.saved - offloaded - recomputed,
            offloaded=offloaded,
            recomputed=recomputed,
            exposed_seconds=self.exposed,
            recompute_seconds=self.recomputing,
            fits=self.over <= 0,
            why=self._why(hidden, offloaded),
        )

    def _why(self, hidden: bool, offloaded: int) -> str:
        room = f"{format_bytes(self.saved)} saved, {format_bytes(self.hbm_room)} of HBM for them"
        if self.over > 0:
            return f"{room}: {format_bytes(self.over)} too much even so"
        if not offloaded and not self.recomputing:
            return f"{room}: all of it stays"
        if hidden:
            return f"{room}: {format_bytes(offloaded)} to Grace, hidden behind computation"
        extra = format_seconds(self.exposed + self.recomputing)
        return f"{room}: {format_bytes(offloaded)} to Grace; link or Grace is the limit, which costs {extra} per step"


# -- with activations in Grace, or without --------------------------------------------------------------------------

Way = Literal["with", "without"]

TURN = 3
"""Steps in a row the same way; the first of them is not counted, since it pays for the change."""
ENOUGH = 4
"""Counted steps of one shape, each way; of all shapes together twice as many, each with one of its own shape."""
PATIENCE = 192
"""Steps after which half of that has to do."""


@dataclass(frozen=True)
class WayVerdict:
    way: Way
    gain: float | None
    """Share of a step's time that offloading saves (negative: costs); None where nothing could be compared."""
    why: str


class Comparison:
    """Asked before each step which way to go, told afterwards how long it took."""

    def __init__(self) -> None:
        self._times: dict[Hashable, dict[Way, list[float]]] = defaultdict(lambda: {"with": [], "without": []})
        self._steps = 0
        self.verdict: WayVerdict | None = None

    def way(self) -> Way:
        if self.verdict is not None:
            return self.verdict.way
        return "with" if (self._steps // TURN) % 2 == 0 else "without"

    def took(self, shape: Hashable, seconds: float, *, counts: bool = True) -> None:
        """The step just gone, in the way that ``way`` said. ``counts``: false for one that was still learning."""
        if self.verdict is not None:
            return
        first_of_turn = self._steps % TURN == 0
        if counts and not first_of_turn:
            self._times[shape][self.way()].append(seconds)
        self._steps += 1
        compared = {shape: times for shape, times in self._times.items() if _pairs(times)}
        pairs = [_pairs(times) for times in compared.values()]
        if max(pairs, default=0) >= ENOUGH or sum(pairs) >= 2 * ENOUGH:
            self.verdict = decide(compared)
        elif self._steps >= PATIENCE:
            self.verdict = decide(compared if sum(pairs) >= ENOUGH else {})


def _pairs(times: dict[Way, list[float]]) -> int:
    return min(len(seconds) for seconds in times.values())


def decide(times: dict[Hashable, dict[Way, list[float]]]) -> WayVerdict:
    """From counted times by shape and way. Equal is as good as slower: what is simpler stays.

    The median over shapes, each as often as it came, as well as within one: a few steps with a validation in them
    decide nothing.
    """
    votes: list[float] = []
    for ways in times.values():
        took, otherwise = median(ways["with"]), median(ways["without"])
        if otherwise > 0:
            votes += [took / otherwise] * sum(len(seconds) for seconds in ways.values())
    if not votes:
        return WayVerdict("without", None, "no shape came often enough to compare")
    gain = 1 - median(votes)
    if gain > 0:
        return WayVerdict("with", gain, f"a step takes {gain:.1%} less time with activations in Grace")
    return WayVerdict("without", gain, f"a step takes {-gain:.1%} more time with activations in Grace")
