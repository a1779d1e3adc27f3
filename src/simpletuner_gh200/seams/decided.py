"""What ``memory: "auto"`` decided before the run, as the ranks get it."""

from __future__ import annotations

import json
from typing import Any

from simpletuner_gh200.config.blocks import PLACED
from simpletuner_gh200.config.environment import PLACEMENT, text

ORIGIN = "memory: auto"
"""Of a setting that was decided, not given: where it can't work, it is off with the reason."""

_NOT_PLANNED = {"why": "there was no plan: it failed, or --no-plan was given", "then": list(PLACED)}


def read_decision() -> dict[str, Any]:
    """That of the first rank, in every rank of the run."""
    from accelerate.utils import broadcast_object_list

    found = text(PLACEMENT)
    decisions = [json.loads(found) if found else _NOT_PLANNED]
    broadcast_object_list(decisions)
    return decisions[0]
