"""One file per check. A file exports ``CHECK``; see ``simpletuner_gh200.diagnostics.check``."""
