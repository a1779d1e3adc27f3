"""The fields of ``config/form.py`` as SimpleTuner's own: registered, laid out in sections, filled, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from simpletuner_gh200.config.form import OUR_KEYS, PREFIX, FormField, folded, form_fields, our_values, shown_values
from simpletuner_gh200.config.legacy import modernise
from simpletuner_gh200.config.part import TRAINING_BLOCKS

TAB = "hardware"
_FIRST_SECTION = 30
"""Behind SimpleTuner's own sections of the tab."""

_TYPES = {
    "switch": "CHECKBOX",
    "choice": "SELECT",
    "whole": "NUMBER",
    "decimal": "NUMBER",
    "text": "TEXT",
    "list": "TEXT",
}
_LABELS = {"true": "on", "false": "off"}


def section_of(field: FormField) -> str:
    words = field.part.title.lower().replace(":", "").split()
    return "_".join(("gh200", *words))


def registry_fields(types: Any) -> list[Any]:
    """A ConfigField for every key. None has a name that begins with dashes: no parser takes it for a flag."""
    return [_registry_field(types, field, order) for order, field in enumerate(form_fields())]


def _registry_field(types: Any, field: FormField, order: int) -> Any:
    made = types.ConfigField(
        name=field.name,
        arg_name=field.name,
        ui_label=field.label,
        field_type=getattr(types.FieldType, _TYPES[field.kind]),
        tab=TAB,
        section=section_of(field),
        default_value=field.default,
        choices=[{"value": choice, "label": _LABELS.get(choice, choice)} for choice in field.choices] or None,
        dependencies=[
            types.FieldDependency(field=other.name, value=value, operator="equals" if same else "not_equals")
            for other, value, same in field.needs()
        ],
        help_text=field.help,
        tooltip=f"{field.help} ({field.part.block}.{field.key})",
        placeholder="unset" if field.default is None else field.shown(field.default),
        importance=types.ImportanceLevel.IMPORTANT if field.main else types.ImportanceLevel.ADVANCED,
        order=order,
    )
    if field.kind in ("whole", "decimal"):
        # The template asks for these; the class declares only the step.
        made.min_value, made.max_value = field.low, field.high
        made.step = 1 if field.kind == "whole" else "any"
    return made


def section_layouts(layout: Callable[..., Any]) -> list[Any]:
    """One section for each title, in the order of the parts."""
    sections = {section_of(field): field.part for field in form_fields()}
    return [
        layout(
            id=section,
            title=part.title,
            icon="fas fa-sliders-h",
            match_sections=(section,),
            subsection_override="",
            order=_FIRST_SECTION + number,
        )
        for number, (section, part) in enumerate(sections.items())
    ]


def needs_by_name() -> dict[str, list[tuple[str, Any, bool]]]:
    """Field name -> (other field, value, must it have it), for the page to show and hide by."""
    found = {field.name: [(other.name, value, same) for other, value, same in field.needs()] for field in form_fields()}
    return {name: needs for name, needs in found.items() if needs}


def values_for_page(config: Mapping[str, Any]) -> dict[str, Any]:
    """What each of our fields shows for an opened configuration."""
    shown = shown_values(config)
    return {
        field.name: field.typed(shown[field.name]) is True if field.kind == "switch" else shown[field.name]
        for field in form_fields()
    }


# -- from the page back ---------------------------------------------------------------------------------


EDITED = f"{PREFIX}edited_blocks"
"""Under this name the page sends our part of a configuration that was edited as text."""


def split_form(form: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """(what was typed into our fields, everything else) of a submitted form."""
    given: dict[str, list[Any]] = {
        key: form.getlist(key) if hasattr(form, "getlist") else [form[key]]
        for key in form.keys()  # noqa: SIM118
    }
    names = [field.name for field in form_fields()]
    # The page sends what it remembers of a field too, under the name of a flag: the field itself counts.
    typed = {name: _one(given[key]) for name in names for key in (f"--{name}", name) if key in given}
    rest = {
        key: values[0] if len(values) == 1 else values
        for key, values in given.items()
        if key.removeprefix("--") not in names
    }
    return typed, rest


def _one(values: list[Any]) -> str:
    """A checked box sends what stands for "not checked" along with its own value."""
    flat = [str(one) for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return "true" if len(flat) > 1 and "true" in flat else flat[-1] if flat else ""


def fold_into(bundle: Any, typed: Mapping[str, str], sent: Mapping[str, Any], *, replace: bool) -> None:
    """Put our blocks into what SimpleTuner made of a form: as they are in the file, with what was typed on top.

    Where they were edited as text in the page, that stands for the file. ``replace``: the whole configuration was sent,
    and what is not in it is not meant to stay.
    """
    edited = _from_text(sent.get(f"--{EDITED}"))
    if replace:
        before = {key: _from_text(value) for key, value in sent.items()}
    else:
        before = edited if isinstance(edited, dict) else _opened(bundle)
    ours = folded(before, typed)
    for mapping in (bundle.complete_config, bundle.config_dict, bundle.save_config):
        _take_out(mapping)
    bundle.save_config.update(ours)
    for block, value in modernise(ours).blocks.items():
        bundle.complete_config[f"--{block}"] = value
    older = {key: value for key, value in ours.items() if key in ("data_backend", "datasets")}
    bundle.complete_config.update({f"--{key}": value for key, value in older.items()})


def _opened(bundle: Any) -> dict[str, Any]:
    """The configuration that is open in the page; empty where it has no file yet."""
    try:
        config, _metadata = bundle.store.load_config(bundle.active_config)
    except (FileNotFoundError, ValueError):
        return {}
    return our_values(config) if isinstance(config, dict) else {}


def _take_out(mapping: dict[str, Any]) -> None:
    for key in list(mapping):
        plain = key.removeprefix("--")
        if plain in (*OUR_KEYS, EDITED) or plain.startswith(tuple(f"{PREFIX}{block}_" for block in TRAINING_BLOCKS)):
            del mapping[key]


def _from_text(value: Any) -> Any:
    """What a form sent as text, as the JSON it stands for."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
