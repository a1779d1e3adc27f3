"""One file per part of a configuration block. A file exports ``PART``; see ``simpletuner_gh200.config.part``."""
