"""Command-line flags as SimpleTuner takes them: ``--key=value``, ``--key value``, ``key=value``, ``--switch``."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner_gh200.errors import UsageError


def split_flag(flag: str) -> tuple[str, str | None]:
    """``--max_train_steps=5`` -> (``max_train_steps``, ``5``); dashes inside a name count as underscores."""
    name, separator, value = flag.lstrip("-").partition("=")
    return name.replace("-", "_"), value if separator else None


def as_mapping(flags: Sequence[str]) -> dict[str, str]:
    """Flags as key -> text, a switch being ``true``; later ones win."""
    mapping: dict[str, str] = {}
    position = 0
    while position < len(flags):
        name, value = split_flag(flags[position])
        if value is None and position + 1 < len(flags) and not flags[position + 1].startswith("--"):
            position += 1
            value = flags[position]
        mapping[name] = "true" if value is None else value
        position += 1
    return mapping


def take(flags: Sequence[str], *names: str) -> tuple[str | None, list[str]]:
    """Remove ``--name value`` or ``--name=value`` from the flags; returns its last value and the rest."""
    found: str | None = None
    rest: list[str] = []
    position = 0
    while position < len(flags):
        name, value = split_flag(flags[position])
        if flags[position].startswith("--") and name in names:
            if value is None and position + 1 < len(flags) and not flags[position + 1].startswith("--"):
                position += 1
                value = flags[position]
            if value is None:
                raise UsageError(f"--{name} needs a value", remedy=f"write --{name}=VALUE")
            found = value
        else:
            rest.append(flags[position])
        position += 1
    return found, rest
