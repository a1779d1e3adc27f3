"""Traces of published models, made before and kept with the package: the basis of quick answers on a fresh machine.

``published_traces.json`` is written by ``scripts/dev/plan_table.py``, which also prints the table of docs/plan.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from simpletuner_gh200.plan.model_files import published_model
from simpletuner_gh200.plan.traces import Trace

DATA = Path(__file__).with_name("published_traces.json")


@dataclass(frozen=True)
class PublishedTraces:
    """Of one sample of ``area`` pixels (times frames), by whether blocks are checkpointed."""

    area: int
    parameters: int
    traces: Mapping[bool, Trace]


@cache
def _traces() -> Mapping[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))["models"]  # type: ignore[no-any-return]


def published_traces(weights: str, family: str, *, full: bool) -> PublishedTraces | None:
    found = published_model(weights, family)
    if found is None:
        return None
    model, _named = found
    entry = _traces().get(model["names"][0])
    if entry is None:
        return None
    made = entry["full" if full else "lora"]
    traces = {name == "checkpointed": Trace.from_json(found) for name, found in made.items()}
    return PublishedTraces(entry["area"], model["parameters"], traces)
