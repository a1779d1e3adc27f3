"""In-memory datasets: entries, the backend that serves them, and shards by node."""

from simpletuner_gh200.seams.features.store.feature import FEATURE

__all__ = ["FEATURE"]
