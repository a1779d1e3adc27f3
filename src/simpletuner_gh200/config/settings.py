"""Effective settings: our blocks and variables validated as a whole, every value knowing where it came from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from simpletuner_gh200.config.blocks import (
    PARTS,
    PLACED,
    CacheSettings,
    HintSettings,
    InMemorySettings,
    MemorySettings,
    StateSettings,
    parts_of,
)
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS, Part, PartModel
from simpletuner_gh200.errors import ConfigError, Problem

M = TypeVar("M", bound=PartModel)

DEFAULT = "default"


@dataclass(frozen=True)
class Settings:
    """What is in force. ``origins`` maps ``block.key`` to default, environment or a named source."""

    parts: Mapping[type[PartModel], PartModel]
    origins: Mapping[str, str]
    given_blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The blocks as they were given, before defaults."""
    notes: tuple[str, ...] = ()
    """Older spellings that were accepted, and what they now mean; settings that have no effect."""
    in_memory_datasets: tuple[str, ...] = ()
    """Ids of the dataset entries of type ``in_memory``."""

    def part(self, model: type[M]) -> M:
        value = self.parts[model]
        assert isinstance(value, model)
        return value

    def given(self, key: str) -> bool:
        """Was ``block.key`` set by someone, rather than left at its default?"""
        return self.origins.get(key, DEFAULT) != DEFAULT

    def placed(self, values: Mapping[str, Any], origin: str) -> Settings:
        """With those of ``values``, by ``block.key``, that nobody has set."""
        parts, taken = dict(self.parts), {name: value for name, value in values.items() if not self.given(name)}
        for part in PARTS:
            mine = {key: taken[name] for key in part.names() if (name := f"{part.block}.{key}") in taken}
            if mine:
                parts[part.model] = self.parts[part.model].model_copy(update=mine)
        return replace(self, parts=parts, origins={**self.origins, **dict.fromkeys(taken, origin)})

    @property
    def any_given(self) -> bool:
        return any(self.given_blocks.values())

    @property
    def caching_in_parallel(self) -> bool:
        """Are pictures to be prepared on all cores, ahead of the VAE?"""
        cache = self.part(CacheSettings)
        served = bool(self.in_memory_datasets) or cache.vae_cache_type == "unified_memory"
        return cache.caching == "parallel" or (cache.caching is None and served)

    def rows(self) -> list[tuple[str, Any, str]]:
        """(key, value, origin) for people and for ``--json``."""
        return [
            (f"{part.block}.{key}", getattr(self.parts[part.model], key), self.origins[f"{part.block}.{key}"])
            for block in TRAINING_BLOCKS
            for part in parts_of(block)
            for key in part.names()
        ]


def resolve(blocks: Mapping[str, Any], environment: Mapping[str, str], *, source: str = "config") -> Settings:
    """Validate the training blocks together with the environment; raise one ConfigError with all problems."""
    problems: list[Problem] = []
    parts: dict[type[PartModel], PartModel] = {}
    origins: dict[str, str] = {}
    given: dict[str, Mapping[str, Any]] = {}
    for block in TRAINING_BLOCKS:
        raw = _as_mapping(block, blocks.get(block), problems)
        given[block] = raw
        _refuse_unknown(block, raw, problems)
        for part in parts_of(block):
            model, where = _resolve_part(part, raw, environment, source, problems)
            origins.update(where)
            if model is not None:
                parts[part.model] = model
    if problems:
        raise ConfigError(problems, source=source)
    return Settings(parts, origins, given)


def resolve_dataset(raw: object, *, where: str) -> InMemorySettings:
    """Validate the ``in_memory`` block of one dataset entry; ``where`` names the entry in messages."""
    problems: list[Problem] = []
    values = _as_mapping(where, raw, problems)
    _refuse_unknown(DATASET_BLOCK, values, problems, shown=where)
    (part,) = parts_of(DATASET_BLOCK)
    known = {key: value for key, value in values.items() if key in part.names()}
    model = _validated(part, known, where, problems)
    if model is None or problems:
        raise ConfigError(problems)
    assert isinstance(model, InMemorySettings)
    return model


def our_variables() -> list[str]:
    """Of every setting that has one."""
    return [variable for part in PARTS for variable in part.environment.values()]


# -- one block, one part -------------------------------------------------------------------------------


def _as_mapping(block: str, raw: object, problems: list[Problem]) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as broken:
            problems.append(Problem(block, f"{raw!r} is not JSON: {broken}"))
            return {}
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        problems.append(Problem(block, f"{raw!r} is not a block", 'write it as {"key": value, ...}'))
        return {}
    return dict(raw)


def _refuse_unknown(block: str, raw: Mapping[str, Any], problems: list[Problem], *, shown: str | None = None) -> None:
    accepted = [key for part in parts_of(block) for key in part.names()]
    for key in raw:
        if key in accepted:
            continue
        close = difflib.get_close_matches(key, accepted, n=1, cutoff=0.5)
        remedy = f"did you mean {close[0]!r}?" if close else f"accepted: {', '.join(accepted)}"
        # The value stands right behind its key, where whoever prints this can tell a secret by the key's name.
        problems.append(Problem(f"{shown or block}.{key} = {raw[key]!r}", "unknown key", remedy))


def _resolve_part(
    part: Part, raw: Mapping[str, Any], environment: Mapping[str, str], source: str, problems: list[Problem]
) -> tuple[PartModel | None, dict[str, str]]:
    values: dict[str, Any] = {}
    variables = {key: variable for key, variable in part.environment.items() if environment.get(variable)}
    origins = {f"{part.block}.{key}": DEFAULT for key in part.names()}
    for key, variable in variables.items():
        try:
            values[key] = part.from_text(key, environment[variable])
        except ValueError as bad:
            problems.append(Problem(variable, str(bad)))
        origins[f"{part.block}.{key}"] = f"environment ({variable})"
    for key in part.names():
        if key in raw:
            values[key] = raw[key]
            origins[f"{part.block}.{key}"] = source
            variables.pop(key, None)
    return _validated(part, values, part.block, problems, variables), origins


def _validated(
    part: Part,
    values: Mapping[str, Any],
    where: str,
    problems: list[Problem],
    variables: Mapping[str, str] | None = None,
) -> PartModel | None:
    """The model, or None; ``variables`` names the variable of each key that came from the environment."""
    places = {key: (variables or {}).get(key, f"{where}.{key}") for key in part.names()}
    model, reasons = _model(part, values)
    if model is None:
        problems.extend(
            Problem(places[key], f"{values[key]!r}: {' or '.join(dict.fromkeys(found))}")
            for key, found in reasons.items()
        )
        # What is wrong between the other keys is found now too, not when these are corrected.
        sound, _none = _model(part, {key: value for key, value in values.items() if key not in reasons})
    else:
        sound = model
    if part.check is not None and sound is not None:
        problems.extend(Problem(places[key], message) for key, message in part.check(sound) if key not in reasons)
    return model


def _model(part: Part, values: Mapping[str, Any]) -> tuple[PartModel | None, dict[str, list[str]]]:
    """The model; or None, and key -> what is wrong with its value."""
    try:
        return part.model.model_validate(values), {}
    except ValidationError as invalid:
        # A union reports each of its branches: they are one problem.
        reasons: dict[str, list[str]] = {}
        for error in invalid.errors(include_url=False):
            key = str(error["loc"][0])
            reasons.setdefault(key, []).append(_reason(error, part, key))
        return None, reasons


def _reason(error: Any, part: Part, key: str) -> str:
    """Pydantic's reason, with the accepted values spelt out."""
    schema = part.model.model_json_schema()["properties"].get(key, {})
    choices = [value for branch in (schema, *schema.get("anyOf", ())) for value in branch.get("enum", ())]
    if choices:
        return f"accepted: {', '.join(repr(choice) for choice in choices)}"
    if error["type"] == "finite_number":
        return "accepted: a finite number; leave the key out for its default"
    message = str(error["msg"])
    return message[0].lower() + message[1:]


# -- settings that somebody chose and that reach nothing, because another one is off: told, so that none is lost ------
# What was switched off by name is left alone: its other keys wait there for the day it is switched on again.

_OVERSUBSCRIPTION = ("uvm_oversubscription_ratio", "uvm_access_pattern")
_WITHOUT_UVM = (
    "nothing is kept beyond HBM without use_uvm, only placement hints follow the pattern; "
    'set "use_uvm": true, or GH200_USE_UVM=1, to keep optimizer state and EMA in Grace'
)
_HINTS = "gh200_optimizations.enable_uvm_hints"


def without_effect(settings: Settings) -> list[str]:
    """One note for each setting that has to be switched on and is not."""
    notes = []
    for part in (part for block in TRAINING_BLOCKS for part in parts_of(block)):
        for key in part.names():
            where, value = f"{part.block}.{key}", getattr(settings.parts[part.model], key)
            # The environment script sets these two at their defaults.
            chosen = key in _OVERSUBSCRIPTION or value != part.model.model_fields[key].default
            if settings.given(where) and chosen and (why := _lacking(settings, part, key)) is not None:
                notes.append(f"{where} {json.dumps(value)} ({settings.origins[where]}) has no effect: {why}")
    hints_off = settings.given(_HINTS) and settings.part(HintSettings).enable_uvm_hints is False
    if hints_off and _served(settings) and not settings.origins[_HINTS].startswith("environment"):
        notes.append('cache_config: the caches are "standard" all the same, because enable_uvm_hints is false')
    return notes


def _lacking(settings: Settings, part: Part, key: str) -> str | None:
    """What would have to be set for this key to mean something."""
    model = settings.parts[part.model]
    if settings.part(MemorySettings).memory == "auto" and part.feature in PLACED and key not in _OVERSUBSCRIPTION:
        return None  # that is decided later
    if part.model is CacheSettings:
        kinds = (f"{part.block}.{kind}" for kind in part.names() if kind.endswith("_cache_type"))
        if _served(settings) or any(map(settings.given, kinds)):
            return None
        return 'no cache is of type "unified_memory"; set vae_cache_type, text_cache_type or another'
    if key in _OVERSUBSCRIPTION:
        return None if settings.part(StateSettings).use_uvm else _WITHOUT_UVM
    if part.switch is not None and not settings.given(f"{part.block}.{part.switch}"):
        return f"{part.switch} is not set"
    other, needed = part.needs.get(key, (key, None))
    switched_on = part.switch is None or getattr(model, part.switch) != part.model.model_fields[part.switch].default
    if other == key or not switched_on or getattr(model, other) == needed:
        return None
    return f"{other} is not {json.dumps(needed)}"


def _served(settings: Settings) -> bool:
    return any(settings.part(CacheSettings).served().values())
