"""Unified-memory caches: what is found, how it is served, how batches are made from it."""

from simpletuner_gh200.seams.features.caches.feature import FEATURE

__all__ = ["FEATURE"]
