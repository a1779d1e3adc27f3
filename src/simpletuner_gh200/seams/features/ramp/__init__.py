"""The batch ramp in a running SimpleTuner: windows, what waits for their end, what is measured by them."""

from simpletuner_gh200.seams.features.ramp.feature import FEATURE

__all__ = ["FEATURE"]
