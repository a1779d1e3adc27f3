"""Epochs measured in micro-batches, since they have no fixed number of optimizer steps while the batch changes."""

from __future__ import annotations

from collections.abc import Callable


def epoch_progress(epoch: int, consumed: int, batches_in: Callable[[int], int]) -> float:
    """Epochs completed after ``consumed`` micro-batches per rank, of which ``epoch`` (from 1 on) is the present one.

    ``batches_in`` tells an epoch's length. The present epoch counts for at most 1: it ends when its data do.
    """
    begun = sum(batches_in(earlier) for earlier in range(1, epoch))
    length = batches_in(epoch)
    share = (consumed - begun) / length if length else 0.0
    return epoch - 1 + min(max(share, 0.0), 1.0)
