"""One file per group of checks. A file exports ``CHECKS``, a tuple of ``SelfCheck``."""
