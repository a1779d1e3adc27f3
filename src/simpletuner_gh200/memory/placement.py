"""Where slabs go: pure decisions from capabilities and measurements, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.driver.interface import Capabilities
from simpletuner_gh200.memory.slab import SlabKind
from simpletuner_gh200.units import format_bytes

Asked = Literal["auto", "registered", "managed", "host"]

WORTH_SWITCHING = 1.10
"""A measured kind must beat registered memory by this much before auto prefers it."""


@dataclass(frozen=True)
class SlabChoice:
    kind: SlabKind
    reason: str


def choose_kind(
    asked: Asked, caps: Capabilities, *, ranks: int = 1, measured: Mapping[SlabKind, float] | None = None
) -> SlabChoice:
    """What kind of slab to make. An explicit request is granted or refused (FeatureUnavailable); auto gets one.

    ``measured`` maps kinds to copy bandwidth towards the device, bytes per second, where somebody measured.
    """
    if asked != "auto":
        refusal = refusal_of(asked, caps, ranks=ranks)
        if refusal is not None:
            raise FeatureUnavailable(
                f"cache_config.slab: {asked!r} is not possible here: {refusal}",
                remedy="set cache_config.slab to 'auto', which says what it chooses",
            )
        return SlabChoice(asked, "asked for")
    return _automatic(caps, measured or {})


def refusal_of(kind: SlabKind, caps: Capabilities, *, ranks: int) -> str | None:
    """Why ``kind`` can't be had on this device with so many ranks per node; None where it can."""
    if kind == "host":
        return None
    if caps.mode == "none":
        return f"there is no CUDA device: {caps.absence}"
    if kind == "registered":
        return None if caps.host_register else "the device can't register host memory"
    return (
        "managed slabs are not offered: the CPU also touches cached data, and pages that both sides touch in turn move "
        "back and forth at a tenth of the link's rate"
    )


def _automatic(caps: Capabilities, measured: Mapping[SlabKind, float]) -> SlabChoice:
    if caps.mode == "none":
        return SlabChoice("host", f"no CUDA device: {caps.absence}")
    if not caps.host_register:
        return SlabChoice("host", "the device can't register host memory")
    pinned, plain = measured.get("registered"), measured.get("host")
    if pinned and plain and caps.pageable_access:
        speeds = f"registered {format_bytes(pinned)}/s, plain {format_bytes(plain)}/s measured"
        if plain > WORTH_SWITCHING * pinned:
            return SlabChoice("host", f"plain memory is faster here: {speeds}")
        return SlabChoice("registered", speeds)
    if caps.integrated:
        return SlabChoice("registered", "one physical pool: pinned in place, no second copy")
    return SlabChoice("registered", "the GPU copies from registered memory directly")
