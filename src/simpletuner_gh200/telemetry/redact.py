"""Keep tokens, keys and webhook addresses out of everything that is printed, recorded or reported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"

_SECRET_NAME = re.compile(
    r"token|secret|passw(or)?d|passphrase|credential|webhook|api_?key|access_?key|private_?key|auth(?!or(s|ed|ing|_|$))|_key$|^key$|cookie|"
    r"signature|dsn|connection_?string",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"tokenizer|max_token|token_?(count|length|limit|drop)|keyword|caption_", re.IGNORECASE)
_SECRET_NUMBER = re.compile(r"passw(or)?d|passphrase|secret|(^|_)pin$", re.IGNORECASE)

# Shapes that are secrets whatever they are called: hub and API tokens, cloud keys, signed links, credentials in a link.
_SECRET_SHAPES = (
    re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{10,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(ghp|gho|ghs|github_pat)_[A-Za-z0-9_]{16,}"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\br8_[A-Za-z0-9]{20,}"),
    re.compile(r"\bAIza[0-9A-Za-z_-]{30,}"),
    re.compile(r"\bbot[0-9]{6,}:[A-Za-z0-9_-]{20,}"),
    re.compile(r"(?<=\bBearer )[A-Za-z0-9._~+/-]{8,}=*", re.IGNORECASE),
    re.compile(r"(?<=\bBasic )[A-Za-z0-9+/]{8,}=*"),
    re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{12,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])"),
    re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),
    re.compile(r"https?://[^\s\"']*(hooks\.|webhook)[^\s\"']*", re.IGNORECASE),
    re.compile(r"(?<=[?&])(?P<name>sig|signature|token|key|X-Amz-[A-Za-z-]+)=[^&\s\"']+", re.IGNORECASE),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$)"),
)
# name=value, name: value, "name": "value", 'name': 'value' and, for flags, --name value; quotes may be escaped.
_NAME = re.compile(r"(?P<flag>--[\w-]+)\s+|(?P<name>[\w-]+)\\?[\"']?\s*[=:]\s*")
_VALUE = re.compile(r"\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|[^\s,;}\])]+")


def names_secret(name: str) -> bool:
    """Does a setting, flag or variable of this name hold a secret?"""
    plain = name.replace("-", "_")
    return bool(_SECRET_NAME.search(plain)) and not _NOT_SECRET.search(plain)


def redact_text(text: str) -> str:
    """Hide secrets in free text: known shapes, and values assigned to names that sound secret."""
    for shape in _SECRET_SHAPES:
        text = shape.sub(HIDDEN, text)
    return _hide_assigned(text)


def _hide_assigned(text: str) -> str:
    """Hide what follows a secret name. What follows another name is looked at again: it may be a name itself."""
    shown, position = [], 0
    while (name := _NAME.search(text, position)) is not None:
        value = _VALUE.match(text, name.end()) if names_secret(name["flag"] or name["name"]) else None
        shown.append(text[position : name.end()])
        position = name.end()
        if value is not None:
            shown.append(HIDDEN)
            position = value.end()
    return "".join([*shown, text[position:]])


def redact(value: Any, *, name: str = "") -> Any:
    """A JSON-like value with its secrets hidden; containers are rebuilt, the original is left alone."""
    if name and names_secret(name) and _worth_hiding(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {_redact_key(key): redact(item, name=str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [redact(item) for item in value]
    return value


def _worth_hiding(name: str, value: Any) -> bool:
    """Switches and counts are no secrets, whatever they are called; a number can be a password."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    return not isinstance(value, int | float) or bool(_SECRET_NUMBER.search(name))


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
            shown.append(f"{name}={_redact_value(value)}" if separator else redact_text(word))
    return shown


def _redact_value(text: str) -> str:
    """A flag's value may itself be a block of JSON with a secret inside."""
    if text[:1] in "{[":
        import json

        try:
            return json.dumps(redact(json.loads(text)))
        except json.JSONDecodeError:
            return redact_text(text)
    return redact_text(text)
