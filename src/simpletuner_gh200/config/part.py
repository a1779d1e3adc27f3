"""A part: the keys of one configuration block that belong to one feature.

``gh200_optimizations`` has a part for the hints, one for the ramp, one for model state and so on. The parts
themselves are in ``config/blocks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from simpletuner_gh200.config.environment import flag_from_text

TRAINING_BLOCKS = ("cache_config", "gh200_optimizations")
"""Blocks of the training configuration, in the order in which they are shown."""

DATASET_BLOCK = "in_memory"
"""The block inside an entry of the dataset list."""


class PartModel(BaseModel):
    """Base of every part's model: strict about names and types, and immutable once made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Part:
    """One feature's keys in one block."""

    block: str
    feature: str
    model: type[PartModel]
    title: str
    """What the section of a form is called that has these keys; parts of one title share a section."""
    switch: str | None = None
    """The key without which the others mean nothing: while it is at its default, a form hides them."""
    main: tuple[str, ...] = ()
    """Keys besides the switch that most people set; the others are for experts."""
    needs: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Key -> another key, and the value it must have for this one to mean something."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Key -> environment variable that sets it where the configuration does not."""
    check: Callable[[Any], list[tuple[str, str]]] | None = None
    """Rules over several keys of the model; returns (key, message) pairs."""

    def names(self) -> tuple[str, ...]:
        return tuple(self.model.model_fields)

    def help(self, key: str) -> str:
        """What the key does, on one line."""
        return " ".join(str(self.model.model_fields[key].description).split())

    def from_text(self, key: str, text: str) -> Any:
        """What the text of the key's variable means. Raises ValueError."""
        kind = self.model.model_fields[key].annotation
        if kind is not float:
            return flag_from_text(text) if kind in (bool, bool | None) else text
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number; give one like 2.5") from None

    def value_in(self, key: str, text: str) -> Any:
        """The same, checked. Raises ValueError with the accepted ones."""
        try:
            return getattr(self.model.model_validate({key: self.from_text(key, text)}), key)
        except ValidationError as invalid:
            raise ValueError(invalid.errors(include_url=False)[0]["msg"]) from None
