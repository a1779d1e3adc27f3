"""Watching a run from outside: it only reads what the run records, so ending it never touches training."""
