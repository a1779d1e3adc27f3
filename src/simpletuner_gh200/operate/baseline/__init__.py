"""Performance baselines: capture one, and say later whether another run is as good."""
