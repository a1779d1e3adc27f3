"""The caching pass on all cores, ahead of the VAE."""

from simpletuner_gh200.seams.features.caching.feature import FEATURE

__all__ = ["FEATURE"]
