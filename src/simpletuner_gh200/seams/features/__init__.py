"""One file per feature. A file exports ``FEATURE``, a subclass of ``simpletuner_gh200.seams.feature.Feature``."""
