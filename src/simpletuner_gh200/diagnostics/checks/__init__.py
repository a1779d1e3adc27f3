"""One file per family of codes. A file exports ``CHECKS``, a tuple; see ``simpletuner_gh200.diagnostics.check``."""
