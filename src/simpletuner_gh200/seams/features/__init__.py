"""The features: one module or package each, exporting ``FEATURE``, a subclass of ``seams.feature.Feature``."""
