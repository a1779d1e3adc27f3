"""An exception of ours inside a batch leads back to SimpleTuner, which makes it itself, never into its loader.

Collate may run in upstream's prefetching thread, which ends at an exception without a word, and the loop then waits
for ever for the next batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("simpletuner_gh200")

T = TypeVar("T")
_reported: set[tuple[str, str]] = set()


def or_upstream(what: str, ours: Callable[[], T], instead: T, count: Callable[[str], None]) -> T:
    """What ``ours`` gives; ``instead``, which makes upstream do it, where it raises.

    Reported once for each kind, and handed to ``count`` each time, with the reason.
    """
    try:
        return ours()
    except Exception as failure:  # whatever it is, upstream can still make the batch
        kind = (what, type(failure).__name__)
        count(f"failed: {type(failure).__name__}")
        if kind not in _reported:
            _reported.add(kind)
            logger.warning(
                "gh200: %s: SimpleTuner does it itself from its own files: %s", what, failure, exc_info=failure
            )
        return instead
