"""Our training blocks as the fields of a form: what each shows, and how what was typed becomes blocks again.

Label, help, choices and range come from the models in ``config/blocks.py``. The way back is exact: a field that shows
what it showed before leaves its key as somebody wrote it, or unwritten; an emptied one takes its key out; keys that no
field has, and blocks that are not sound, stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from simpletuner_gh200.config.blocks import parts_of
from simpletuner_gh200.config.environment import flag_from_text
from simpletuner_gh200.config.legacy import OLDER_KEYS, modernise
from simpletuner_gh200.config.part import TRAINING_BLOCKS, Part, PartModel
from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import ConfigError, Problem

Kind = Literal["switch", "choice", "whole", "decimal", "text", "list"]

PREFIX = "gh200_"
OUR_KEYS = (*TRAINING_BLOCKS, *OLDER_KEYS, "datasets")
"""Top-level keys of a training configuration that are ours; SimpleTuner's own saving would drop most of them."""

_UNITS = {"_gb": ", GiB", "_kb": ", KiB"}
_UNSET = {"type": "null"}
_KINDS: dict[str, Kind] = {
    "boolean": "switch",
    "integer": "whole",
    "number": "decimal",
    "string": "text",
    "array": "list",
}


@cache
def _schema(model: type[PartModel]) -> dict[str, Any]:
    """Key -> its JSON schema."""
    found: dict[str, Any] = model.model_json_schema()["properties"]
    return found


@dataclass(frozen=True)
class FormField:
    """One key as a form shows it."""

    part: Part
    key: str

    @property
    def _kinds(self) -> list[dict[str, Any]]:
        """What a value may be, as JSON schemas."""
        schema = _schema(self.part.model)[self.key]
        found: list[dict[str, Any]] = schema.get("anyOf", [schema])
        return found

    @property
    def kind(self) -> Kind:
        first, *others = self._kinds
        if "enum" in first or (others and first["type"] == "boolean"):
            return "choice"
        return "text" if others not in ([], [_UNSET]) else _KINDS[first["type"]]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self._kinds[0].get("enum", ("true", "false"))) if self.kind == "choice" else ()

    @property
    def low(self) -> float | None:
        """Smallest accepted value, or just below it."""
        return self._kinds[0].get("minimum", self._kinds[0].get("exclusiveMinimum"))

    @property
    def high(self) -> float | None:
        return self._kinds[0].get("maximum")

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.part.block}_{self.key}"

    @property
    def default(self) -> Any:
        return self.part.model.model_fields[self.key].default

    @property
    def label(self) -> str:
        return f"{self.part.model.model_fields[self.key].title}{_UNITS.get(self.key[-3:], '')}"

    @property
    def help(self) -> str:
        return self.part.help(self.key)

    @property
    def main(self) -> bool:
        return self.key == self.part.switch or self.key in self.part.main or len(self.part.names()) == 1

    def needs(self) -> list[tuple[FormField, Any, bool]]:
        """(field, value, must it have it) of what has to hold for this field to mean something."""
        found = []
        if self.part.switch is not None and self.key != self.part.switch:
            switch = FormField(self.part, self.part.switch)
            found.append((switch, True, True) if switch.kind == "switch" else (switch, switch.default, False))
        if self.key in self.part.needs:
            other, value = self.part.needs[self.key]
            found.append((FormField(self.part, other), value, True))
        return found

    def shown(self, value: Any) -> str:
        """What the field says for a value of the configuration; an unsound one is shown as it is written."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        return json.dumps(value)

    def typed(self, text: str) -> Any:
        """The value that somebody typed; None for nothing, and the text itself where it is no such value."""
        text = text.strip()
        if not text:
            return None
        try:
            return self._parsed(text)
        except ValueError:
            return text

    def _parsed(self, text: str) -> Any:
        if self._kinds[0]["type"] == "boolean":
            return flag_from_text(text)
        if self.kind == "decimal":
            number = float(text)
            return int(text) if text.lstrip("-").isdigit() else number
        return int(text) if any(kind["type"] == "integer" for kind in self._kinds) else text


# -- fields from the models -----------------------------------------------------------------------------


@cache
def form_fields() -> tuple[FormField, ...]:
    """Every key of the training blocks, in the order in which they are shown."""
    return tuple(field for block in TRAINING_BLOCKS for part in parts_of(block) for field in fields_of(part))


def fields_of(part: Part) -> tuple[FormField, ...]:
    return tuple(FormField(part, key) for key in part.names())


# -- a configuration, there and back --------------------------------------------------------------------


def our_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration is ours, whichever way SimpleTuner spells its keys."""
    plain = {key.removeprefix("--"): value for key, value in config.items()}
    return {key: plain[key] for key in OUR_KEYS if plain.get(key) not in (None, "")}


def shown_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Field name -> what it shows, for every field."""
    blocks = modernise(our_values(config)).blocks
    return {field.name: field.shown(_written(blocks, field)) for field in form_fields()}


def folded(config: Mapping[str, Any], typed: Mapping[str, str]) -> dict[str, Any]:
    """Our part of the configuration with what was typed into the fields; fields that were not sent change nothing."""
    ours = our_values(config)
    blocks = modernise(ours).blocks
    for field in form_fields():
        if field.name not in typed:
            continue
        before, now = field.shown(_written(blocks, field)), typed[field.name]
        old, new = field.typed(before), field.typed(now)
        if field.kind == "switch" and not isinstance(old, bool) and new is False:
            continue  # A box has no third state: unchecked is how the page shows what is neither.
        if now.strip() != before and new != old:
            _change(ours, field, new)
    return ours


def _written(blocks: Mapping[str, Any], field: FormField) -> Any:
    block = blocks.get(field.part.block)
    return block.get(field.key, field.default) if isinstance(block, Mapping) else field.default


def _change(ours: dict[str, Any], field: FormField, value: Any) -> None:
    block = modernise({field.part.block: ours.get(field.part.block)}).blocks[field.part.block]
    if block is not None and not isinstance(block, Mapping):
        return  # Not ours to throw away: it is reported, and stays until somebody mends it.
    changed = {key: old for key, old in (block or {}).items() if key != field.key}
    ours.pop(field.key, None) if value is None else changed.update({field.key: value})
    if changed:
        ours[field.part.block] = changed
    else:
        ours.pop(field.part.block, None)


def form_problems(ours: Mapping[str, Any]) -> list[Problem]:
    """What no field may hold. Unknown keys are not a field's doing: they are kept, and reported by validation."""
    blocks = modernise(ours).blocks
    known = {
        block: {key: value for key, value in given.items() if any(key in part.names() for part in parts_of(block))}
        if isinstance(given, Mapping)
        else given
        for block, given in blocks.items()
    }
    try:
        resolve(known, {})
    except ConfigError as bad:
        return list(bad.problems)
    return []


def field_problem(name: str, value: str, others: Mapping[str, str]) -> str | None:
    """What is wrong with one field, as ``gh200 config check`` would say it, given what the others hold."""
    field = next((field for field in form_fields() if field.name == name), None)
    if field is None:
        return None
    where = f"{field.part.block}.{field.key}"
    problems = form_problems(folded({}, {**others, name: value}))
    return next((str(problem) for problem in problems if problem.where == where), None)
