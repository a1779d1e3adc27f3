"""One file per seam. A file exports ``SPEC``; see ``simpletuner_gh200.upstream.spec``."""
