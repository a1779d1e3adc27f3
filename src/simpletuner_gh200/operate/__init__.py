"""Around the run: launch, environment, project files, baseline, monitor, report."""
