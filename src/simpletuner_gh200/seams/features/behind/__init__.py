"""Checkpoints saved to memory, and drained to the disk behind the run."""

from simpletuner_gh200.seams.features.behind.feature import FEATURE

__all__ = ["FEATURE"]
