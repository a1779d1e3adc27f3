"""The batch ramp: its schedule and its accumulation windows. Knows no SimpleTuner."""
