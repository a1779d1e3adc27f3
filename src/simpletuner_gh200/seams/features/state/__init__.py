"""Model state in Grace."""

from simpletuner_gh200.seams.features.state.feature import FEATURE

__all__ = ["FEATURE"]
