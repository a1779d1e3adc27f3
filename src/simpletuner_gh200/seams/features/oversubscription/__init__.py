"""Training state beyond HBM."""

from simpletuner_gh200.seams.features.oversubscription.feature import FEATURE

__all__ = ["FEATURE"]
