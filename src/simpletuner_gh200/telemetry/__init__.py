"""What people and scripts get to see of a run: progress, records, sinks, redaction."""
