"""SimpleTuner on Grace-Hopper: in-memory datasets, unified-memory caches, an exact batch ramp."""

__version__ = "0.1.0"
