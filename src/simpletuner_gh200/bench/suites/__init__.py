"""One file per suite. A file exports ``SUITE``; see ``simpletuner_gh200.bench.suite``."""
