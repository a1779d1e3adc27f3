"""Telemetry of a training run: the loop's clock, records, sources."""

from simpletuner_gh200.seams.features.telemetry.feature import FEATURE

__all__ = ["FEATURE"]
