"""Around the run: environment, launch settings, project files, baseline, monitor, report."""
