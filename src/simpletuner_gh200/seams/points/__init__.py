"""One file per seam. A file exports ``SEAM``; see ``simpletuner_gh200.seams.seam``."""
