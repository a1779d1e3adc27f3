"""Settings that somebody chose and that reach nothing, because another one is off: told, so that none is lost.

What was switched off by name is left alone: its other keys wait there for the day it is switched on again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from simpletuner_gh200.config.blocks import CacheSettings, HintSettings, StateSettings, parts_of
from simpletuner_gh200.config.part import TRAINING_BLOCKS, Part
from simpletuner_gh200.config.settings import Settings

_OVERSUBSCRIPTION = ("uvm_oversubscription_ratio", "uvm_access_pattern")


def without_effect(settings: Settings) -> list[str]:
    """One note for each setting that has to be switched on and is not."""
    notes = [*_without_use_uvm(settings), *_unserved_caches(settings)]
    for block in TRAINING_BLOCKS:
        for part in parts_of(block):
            notes += [*_switched_off(settings, part), *_lacking_another(settings, part)]
    return notes


def _without_use_uvm(settings: Settings) -> Iterator[str]:
    """Also at their defaults: the environment script sets both."""
    state = settings.part(StateSettings)
    chosen = [key for key in _OVERSUBSCRIPTION if settings.given(f"gh200_optimizations.{key}")]
    if state.use_uvm or not chosen:
        return
    shown = ", ".join(
        f"{key} {getattr(state, key)} ({settings.origins[f'gh200_optimizations.{key}']})" for key in chosen
    )
    remedy = 'set "use_uvm": true, or GH200_USE_UVM=1, to keep optimizer state and EMA in Grace'
    yield f"{shown}: nothing is kept beyond HBM without use_uvm, only placement hints follow the pattern; {remedy}"


def _unserved_caches(settings: Settings) -> Iterator[str]:
    (part,) = parts_of("cache_config")
    kinds = [key for key in part.names() if key.endswith("_cache_type")]
    served = any(settings.part(CacheSettings).served().values())
    hints = "gh200_optimizations.enable_uvm_hints"
    by_name = settings.given(hints) and not settings.origins[hints].startswith("environment")
    if served and by_name and settings.part(HintSettings).enable_uvm_hints is False:
        yield 'cache_config: the caches are "standard" all the same, because enable_uvm_hints is false'
    if not served and not any(settings.given(f"cache_config.{kind}") for kind in kinds):
        why = 'no cache is of type "unified_memory"; set vae_cache_type, text_cache_type or another'
        yield from _told(settings, part, part.names(), why)


def _switched_off(settings: Settings, part: Part) -> Iterator[str]:
    if part.switch is None or settings.given(f"{part.block}.{part.switch}"):
        return
    others = [key for key in part.names() if key not in (part.switch, *_OVERSUBSCRIPTION)]
    yield from _told(settings, part, others, f"{part.switch} is not set")


def _lacking_another(settings: Settings, part: Part) -> Iterator[str]:
    model = settings.parts[part.model]
    if part.switch is not None and getattr(model, part.switch) == part.model.model_fields[part.switch].default:
        return
    for key, (other, needed) in part.needs.items():
        if getattr(model, other) != needed:
            yield from _told(settings, part, [key], f"{other} is not {json.dumps(needed)}")


def _told(settings: Settings, part: Part, keys: Iterable[str], why: str) -> Iterator[str]:
    model = settings.parts[part.model]
    for key in keys:
        value, where = getattr(model, key), f"{part.block}.{key}"
        if settings.given(where) and value != part.model.model_fields[key].default:
            yield f"{where} {json.dumps(value)} ({settings.origins[where]}) has no effect: {why}"
