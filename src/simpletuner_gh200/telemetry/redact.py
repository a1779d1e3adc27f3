"""Keep tokens, keys and webhook addresses out of everything that is printed, recorded or reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpletuner_gh200.telemetry.secret_shapes import (
    BEFORE_CHECKSUM,
    CHECKSUM_NAME,
    HEADER_NAME,
    HEX_KEY,
    NOT_SECRET_NAME,
    SECRET_NAME,
    SECRET_NUMBER,
    SHAPES,
    WORKING_FOLDERS,
)

HIDDEN = "<hidden>"

# name=value, name: value, "name": "value", 'name': 'value' and, for flags, --name value; quotes may be escaped.
# A name is looked for where a word begins and taken whole (++): a long word without any is passed over once.
_NAME = re.compile(r"(?<![\w-])(?:(?P<flag>--[\w-]++)\s+|(?P<name>[\w-]++)\\?[\"']?\s*[=:]\s*)")
_QUOTED = r"\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|"
_VALUE = re.compile(_QUOTED + r"[^\s,;}\])]+")
_VARIABLE_VALUE = re.compile(_QUOTED + r"\S+")
_HEADER_VALUE = re.compile(r"[^\n\"']+")


def names_secret(name: str) -> bool:
    """Does a setting, flag or variable of this name hold a secret?"""
    plain = name.strip("-").replace("-", "_")
    if plain in WORKING_FOLDERS:
        return False
    return bool(SECRET_NAME.search(plain)) and not NOT_SECRET_NAME.search(plain)


def redact_text(text: str, *, name: str = "") -> str:
    """Hide secrets in free text: known shapes, and values assigned to names that sound secret.

    ``name`` is that of the setting whose value this is.
    """
    for shape, group in SHAPES:
        text = shape.sub(_hiding(group), text)
    if not CHECKSUM_NAME.search(name):
        text = HEX_KEY.sub(_hide_unless_checksum, text)
    return _hide_assigned(text)


def _hiding(group: int) -> Callable[[re.Match[str]], str]:
    def hide(found: re.Match[str]) -> str:
        start, end = found.start(group) - found.start(), found.end(group) - found.start()
        return found[0][:start] + HIDDEN + found[0][end:]

    return hide


def _hide_unless_checksum(found: re.Match[str]) -> str:
    before = BEFORE_CHECKSUM.search(found.string[max(0, found.start() - 64) : found.start()])
    if before is None:
        return HIDDEN
    return found[0] if before["name"] is None or CHECKSUM_NAME.search(before["name"]) else HIDDEN


def _hide_assigned(text: str) -> str:
    """Hide what follows a secret name. What follows another name is looked at again: it may be a name itself."""
    shown, position = [], 0
    while (name := _NAME.search(text, position)) is not None:
        value = _value_of(name["flag"] or name["name"], name[0], text, name.end())
        shown.append(text[position : name.end()])
        position = name.end()
        if value is not None:
            shown.append(HIDDEN)
            position = value.end()
    return "".join([*shown, text[position:]])


def _value_of(name: str, written: str, text: str, position: int) -> re.Match[str] | None:
    """The secret value at ``position``; None where the name isn't a secret's."""
    if not names_secret(name):
        return None
    if HEADER_NAME.fullmatch(name.replace("-", "_")) and ":" in written:
        return _HEADER_VALUE.match(text, position) or _VALUE.match(text, position)
    # In FOO=bar,baz the value of a variable goes on to the next blank; in prose a comma ends it.
    return (_VARIABLE_VALUE if name.isupper() and written.endswith("=") else _VALUE).match(text, position)


def redact(value: Any, *, name: str = "") -> Any:
    """A JSON-like value with its secrets hidden; containers are rebuilt, the original is left alone."""
    if name and names_secret(name) and _worth_hiding(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        if _is_tally(value):
            return dict(value)
        return {_redact_key(key): redact(item, name=str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return redact_text(value, name=name)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [redact(item) for item in value]
    return value


def _is_tally(value: Mapping[Any, Any]) -> bool:
    """How checks ended: ``{"pass": 17, "fail": 0}``. With no ``fail`` beside it a number may be a password."""
    return {"pass", "fail"} <= value.keys() and all(isinstance(count, int) for count in value.values())


def _worth_hiding(name: str, value: Any) -> bool:
    """Switches and counts are no secrets, whatever they are called; a number can be a password."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    return not isinstance(value, int | float) or bool(SECRET_NUMBER.search(name))


def _redact_key(key: Any) -> Any:
    return redact_text(key) if isinstance(key, str) else key


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags hidden, however they are written."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        name, separator, value = word.partition("=")
        if (separator or word.startswith("--")) and names_secret(name):
            shown.append(f"{name}={HIDDEN}" if separator else word)
            hide_next = not separator
        else:
            shown.append(f"{name}={_redact_value(value, name)}" if separator else redact_text(word))
    return shown


def _redact_value(text: str, name: str) -> str:
    """A flag's value may itself be a block of JSON with a secret inside."""
    if text[:1] in "{[":
        import json

        try:
            return json.dumps(redact(json.loads(text)))
        except json.JSONDecodeError:
            return redact_text(text)
    return redact_text(text, name=name)
