"""Saved activations in Grace."""

from simpletuner_gh200.seams.features.activations.feature import FEATURE

__all__ = ["FEATURE"]
