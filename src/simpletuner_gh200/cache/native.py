"""The C library, under the name by which caches know it."""

from simpletuner_gh200.held.bulk import SOURCE
from simpletuner_gh200.held.bulk import inflating_library as library

__all__ = ["SOURCE", "library"]
