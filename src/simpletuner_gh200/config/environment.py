"""Our environment variables, validated by the models of the keys they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from simpletuner_gh200.config.blocks import PARTS
from simpletuner_gh200.config.part import Part
from simpletuner_gh200.errors import ConfigError, Problem


def our_variables() -> Iterator[tuple[str, Part, str]]:
    """(variable, part, key) of every setting that has a variable."""
    for part in PARTS:
        for key, variable in part.environment.items():
            yield variable, part, key


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Variable -> value, for those that are set; raises one ConfigError naming every bad one."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for variable, part, key in our_variables():
        text = environment.get(variable)
        if not text:
            continue
        try:
            value = part.from_environment.get(key, str)(text)
            values[variable] = getattr(part.model.model_validate({key: value}), key)
        except ValidationError as invalid:
            problems.append(Problem(variable, f"{text!r}: {invalid.errors(include_url=False)[0]['msg']}"))
        except ValueError as invalid:
            problems.append(Problem(variable, f"{text!r}: {invalid}"))
    if problems:
        raise ConfigError(problems, source="the environment")
    return values


def default_of(variable: str) -> Any:
    """What the setting behind a variable is where nobody sets it."""
    for name, part, key in our_variables():
        if name == variable:
            return part.model.model_fields[key].default
    raise KeyError(variable)
