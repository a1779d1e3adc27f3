"""``gh200 prove``: what this machine measures, and what each feature does to a real run on it, as one report."""
