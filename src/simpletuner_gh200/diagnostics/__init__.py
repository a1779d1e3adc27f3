"""Doctor and self-test."""
