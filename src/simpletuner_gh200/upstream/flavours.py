"""Which repository SimpleTuner takes a model from, where a configuration names a family and at most a flavour.

Read as syntax from the installed release: importing one of its models takes longer than everything a quick plan does.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.option_table import ModelFamily

_REGISTERED = re.compile(r"^ModelRegistry\.register\(\s*[\"']([^\"']+)[\"']\s*,\s*(\w+)", re.MULTILINE)
_LISTED = "model_metadata.json"
"""From 4.0: families by name, beside those that register themselves."""


def families() -> frozenset[str]:
    """Every name that the installed SimpleTuner has for a family; none where it is not installed."""
    return frozenset(_classes())


@lru_cache(maxsize=8)
def flavours_of(family: str) -> ModelFamily:
    """Nothing known of a family that isn't there, or keeps its flavours in a way that we do not read."""
    try:
        file, name = _classes()[family.lower()]
        module = ast.parse(file.read_bytes())
    except (KeyError, OSError, SyntaxError):
        return ModelFamily({})
    paths = syntax.string_keys(syntax.value_of(syntax.find(module, f"{name}.HUGGINGFACE_PATHS")))
    found = {flavour: text for flavour, value in paths.items() if (text := _text(module, value)) is not None}
    default = syntax.value_of(syntax.find(module, f"{name}.DEFAULT_MODEL_FLAVOUR"))
    return ModelFamily(found, _text(module, default))


def _text(module: ast.Module, value: ast.expr | None) -> str | None:
    """A string, or the name of one that the module has."""
    if isinstance(value, ast.Name):
        value = syntax.value_of(syntax.find(module, value.id))
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, tuple[Path, str]]:
    """Family -> the file and the name of its class."""
    package = find_package("simpletuner")
    if package is None:
        return {}
    models = package / "helpers" / "models"
    return {name.lower(): place for name, place in (*_listed(models), *_registered(models))}


def _registered(models: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    for file in sorted(models.glob("*/model.py")):
        for name, kind in _REGISTERED.findall(file.read_text(encoding="utf-8", errors="replace")):
            yield name, (file, kind)


def _listed(models: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    try:
        listed = json.loads((models / _LISTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, entry in listed.items():
        yield name, (models / entry["module_path"].split(".")[-2] / "model.py", entry["class_name"])
