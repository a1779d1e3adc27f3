"""One file per block of lines in the demo summary. A file exports ``LINE``; see ``simpletuner_gh200.demo.summary``."""
