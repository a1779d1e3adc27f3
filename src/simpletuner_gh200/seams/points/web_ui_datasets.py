"""In-memory datasets in the Web UI: a card beside the local one, and what is wrong with an entry."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.datasets import IN_MEMORY, Dataset
from simpletuner_gh200.seams.patch import Patch, put, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam

LOCAL_CARD = "local-image"


def _card(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    cards = list(module._BLUEPRINTS)
    (place,) = [number for number, card in enumerate(cards) if card.id == LOCAL_CARD]
    return [put(module, "_BLUEPRINTS", [*cards[: place + 1], _in_memory(module, cards[place]), *cards[place + 1 :]])]


def _in_memory(module: ModuleType, local: Any) -> Any:
    """The local card with another type: what makes a local dataset makes one that is held in memory."""
    card = local.model_copy(deep=True)
    card.id, card.backendType = "in-memory-image", IN_MEMORY
    card.label = "in memory"
    card.description = "a folder that a run reads into memory once per node, shared by its ranks (simpletuner-gh200)"
    card.defaults = {**card.defaults, "type": IN_MEMORY}
    for field in card.fields:
        if field.id == "type":
            field.defaultValue = IN_MEMORY
            field.options = [*(field.options or ()), module.DatasetFieldOption(value=IN_MEMORY, label="in memory")]
    return card


def _validations(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_our_problems(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entries = args[0] if args else kwargs["datasets"]
        found = wrapped(*args, **kwargs)
        datasets = [Dataset(entry) for entry in entries if isinstance(entry, dict)]
        found += [
            module.ValidationMessage(field=f"{dataset.id}.{IN_MEMORY}", message=str(problem), level="error")
            for dataset in datasets
            if dataset.enabled
            for problem in dataset.problems()
        ]
        return found

    return [wrap_method(module, "compute_validations", with_our_problems)]


SEAMS = (
    Seam("web_ui_datasets.cards", _card),
    Seam("web_ui_datasets.validations", _validations),
)
