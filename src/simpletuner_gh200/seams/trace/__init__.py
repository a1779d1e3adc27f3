"""One training step of SimpleTuner's own classes without weights: what it keeps, what it peaks at. Runs as a child."""
